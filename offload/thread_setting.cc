#include "offload/thread_setting.h"

#include <mutex>

#include <ATen/Context.h>
#include <ATen/autocast_mode.h>

namespace ebb {
namespace {

constexpr std::array kAutocastDevices{at::kCPU, at::kCUDA};

at::Generator generator(c10::Device device) { return at::globalContext().defaultGenerator(device); }

at::Tensor state_of(at::Generator generator) {
  const std::lock_guard lock(generator.mutex());
  return generator.get_state();
}

void set_state(at::Generator generator, const at::Tensor& state) {
  const std::lock_guard lock(generator.mutex());
  generator.set_state(state);
}

}  // namespace

ThreadSetting::ThreadSetting(std::optional<c10::Device> device)
    : device_(device && device->is_cuda() ? device : std::nullopt),
      cpu_state_(state_of(generator(c10::Device(c10::kCPU)))),
      device_state_(device_ ? state_of(generator(*device_)) : at::Tensor()),
      autocast_caches_(at::autocast::is_autocast_cache_enabled()) {
  for (std::size_t i = 0; i < kAutocastDevices.size(); ++i) {
    autocast_.at(i) = {at::autocast::is_autocast_enabled(kAutocastDevices.at(i)),
                       at::autocast::get_autocast_dtype(kAutocastDevices.at(i))};
  }
}

void ThreadSetting::put_in_force() const {
  set_state(generator(c10::Device(c10::kCPU)), cpu_state_);
  if (device_) {
    set_state(generator(*device_), device_state_);
  }
  for (std::size_t i = 0; i < kAutocastDevices.size(); ++i) {
    at::autocast::set_autocast_enabled(kAutocastDevices.at(i), autocast_.at(i).enabled);
    at::autocast::set_autocast_dtype(kAutocastDevices.at(i), autocast_.at(i).dtype);
  }
  at::autocast::set_autocast_cache_enabled(autocast_caches_);
}

SettingInForce::SettingInForce(const ThreadSetting& setting) : before_(setting.device_) { setting.put_in_force(); }

SettingInForce::~SettingInForce() {
  before_.put_in_force();
  bool casts = false;
  for (const auto& autocast : before_.autocast_) {
    casts = casts || autocast.enabled;
  }
  if (!casts) {  // nobody else would let go of the weights that were cast
    at::autocast::clear_cache();
  }
}

}  // namespace ebb

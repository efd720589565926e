#include "offload/autograd/thread_setting.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <mutex>

#include <ATen/Context.h>
#include <ATen/detail/CUDAHooksInterface.h>

#include "offload/base/log.h"

namespace ebb {
namespace {

at::Tensor state_of(at::Generator generator) {
  const std::lock_guard lock(generator.mutex());
  return generator.get_state();
}

}  // namespace

ThreadSetting::ThreadSetting() {
  const auto add = [this](c10::Device device) {
    const at::Generator& generator = at::globalContext().defaultGenerator(device);
    random_.push_back({generator, state_of(generator)});
  };
  add(c10::kCPU);
  const at::CUDAHooksInterface& cuda = at::detail::getCUDAHooks();
  const int gpus = at::globalContext().hasCUDA() ? cuda.deviceCount() : 0;
  for (int gpu = 0; gpu < gpus; ++gpu) {
    const auto index = static_cast<c10::DeviceIndex>(gpu);
    if (cuda.hasPrimaryContext(index)) {
      add(c10::Device(c10::kCUDA, index));
    }
  }
}

void ThreadSetting::forget_unchanged_random_state() {
  const auto is_same = [](const RandomState& each) {
    const at::Tensor now = state_of(each.generator);  // compared without an operation, which dispatch modes would see
    return now.nbytes() == each.state.nbytes() &&
           std::memcmp(now.const_data_ptr(), each.state.const_data_ptr(), now.nbytes()) == 0;
  };
  if (std::ranges::all_of(random_, is_same)) {
    random_.clear();
  }
}

void ThreadSetting::put_random_state_in_force() const {
  for (const RandomState& each : random_) {
    at::Generator generator = each.generator;
    const std::lock_guard lock(generator.mutex());
    generator.set_state(each.state);
  }
}

void ThreadSetting::put_autocast_in_force() const {
  for (const Autocast& each : autocast_) {
    at::autocast::set_autocast_enabled(each.device, each.enabled);
    at::autocast::set_autocast_dtype(each.device, each.dtype);
  }
  at::autocast::set_autocast_cache_enabled(autocast_caches_);
}

SettingInForce::SettingInForce(const ThreadSetting& setting) : puts_random_state_back_(!setting.random_.empty()) {
  setting.put_random_state_in_force();  // first: it may throw
  setting.put_autocast_in_force();
}

SettingInForce::~SettingInForce() {
  if (puts_random_state_back_) {
    try {
      before_.put_random_state_in_force();
    } catch (const std::exception&) {
      log_warning("the state of the random number generators could not be put back after a checkpointed region's run");
    }
  }
  before_.put_autocast_in_force();
  const auto casts = [](const ThreadSetting::Autocast& autocast) { return autocast.enabled; };
  if (std::ranges::none_of(before_.autocast_, casts)) {  // nobody else would let go of the weights that were cast
    at::autocast::clear_cache();
  }
}

}  // namespace ebb

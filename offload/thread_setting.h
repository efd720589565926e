#pragma once

#include <array>
#include <optional>

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

namespace ebb {

// What decides, beside its inputs, what a function of tensors computes: random state and autocast, as they are on the
// calling thread when this is made.
class ThreadSetting {
 public:
  // Of the CPU's default generator, and of that of `device` if it is a GPU.
  explicit ThreadSetting(std::optional<c10::Device> device);

 private:
  friend class SettingInForce;

  struct Autocast {
    bool enabled = false;
    at::ScalarType dtype = at::kBFloat16;
  };

  void put_in_force() const;

  const std::optional<c10::Device> device_;
  const at::Tensor cpu_state_;
  const at::Tensor device_state_;  // undefined without a GPU
  std::array<Autocast, 2> autocast_;
  bool autocast_caches_;
};

// Puts a setting in force on the calling thread, and at its end what was there before.
class SettingInForce {
 public:
  explicit SettingInForce(const ThreadSetting& setting);
  ~SettingInForce();
  SettingInForce(const SettingInForce&) = delete;
  SettingInForce& operator=(const SettingInForce&) = delete;

 private:
  const ThreadSetting before_;
};

}  // namespace ebb

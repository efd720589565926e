#pragma once

#include <array>
#include <vector>

#include <ATen/autocast_mode.h>
#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

namespace ebb {

// The state that decides, beside its inputs, what a function of tensors computes: the random state of the process's
// default generators (the CPU's, and those of the GPUs that are in use) and the calling thread's autocast, as they are
// when the ThreadSetting is made.
class ThreadSetting {
 public:
  ThreadSetting();

  // Forgets the random state if nobody has drawn random numbers since the ThreadSetting was made.
  void forget_unchanged_random_state();

 private:
  friend class SettingInForce;

  struct Autocast {
    c10::DeviceType device;
    bool enabled = at::autocast::is_autocast_enabled(device);
    at::ScalarType dtype = at::autocast::get_autocast_dtype(device);
  };
  struct RandomState {
    at::Generator generator;
    at::Tensor state;
  };

  void put_random_state_in_force() const;
  void put_autocast_in_force() const;

  std::vector<RandomState> random_;  // empty once forgotten
  std::array<Autocast, 2> autocast_{{{at::kCPU}, {at::kCUDA}}};
  bool autocast_caches_ = at::autocast::is_autocast_cache_enabled();
};

// Puts a setting in force, and puts the previous setting back at its end. Where the setting has a random state, other
// threads must not draw random numbers meanwhile, because the whole process shares the generators.
class SettingInForce {
 public:
  explicit SettingInForce(const ThreadSetting& setting);
  ~SettingInForce();
  SettingInForce(const SettingInForce&) = delete;
  SettingInForce& operator=(const SettingInForce&) = delete;

  // Has the end put the random state back in any case.
  void put_random_state_back() { puts_random_state_back_ = true; }

 private:
  const ThreadSetting before_;
  bool puts_random_state_back_;
};

}  // namespace ebb

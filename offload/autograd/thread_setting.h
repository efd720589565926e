#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

namespace ebb {

// The state that decides, beside its inputs, what a function of tensors computes: the random state of the process's
// default generators (the CPU's, and those of the GPUs that are in use) and the calling thread's autocast, as they are
// when the ThreadSetting is made.
class ThreadSetting {
 public:
  ThreadSetting();

  // Whether nobody has drawn random numbers since the ThreadSetting was made.
  [[nodiscard]] bool random_state_is_unchanged() const;

 private:
  friend class SettingInForce;

  struct Autocast {
    bool enabled = false;
    at::ScalarType dtype = at::kBFloat16;
  };
  struct RandomState {
    at::Generator generator;
    at::Tensor state;
  };

  void put_random_state_in_force() const;
  void put_autocast_in_force() const;

  std::vector<RandomState> random_;
  std::array<Autocast, 2> autocast_;
  bool autocast_caches_;
};

enum class Random : std::uint8_t { kToo, kLeftAlone };

// Puts a setting in force, and puts the previous setting back at its end. With Random::kToo other threads must not draw
// random numbers meanwhile, because the whole process shares the generators.
class SettingInForce {
 public:
  SettingInForce(const ThreadSetting& setting, Random random);
  ~SettingInForce();
  SettingInForce(const SettingInForce&) = delete;
  SettingInForce& operator=(const SettingInForce&) = delete;

  // Has the end put the random state back, too.
  void put_random_state_back() { random_ = Random::kToo; }

 private:
  const ThreadSetting before_;
  Random random_;
};

}  // namespace ebb

#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include "offload/options.h"
#include "test/checked/fault_plan.h"
#include "test/faults/step.h"
#include "test/simulated/simulated_tier.h"

namespace ebb::faults {

// An offloader to try.
struct Setting {
  std::string name;
  Options options;
  std::optional<Schedule> schedule;  // of a SimulatedTier; nullopt: the device's own tier
  bool managed = false;              // the offloader manages the weights, too
};

[[nodiscard]] std::vector<Setting> settings(c10::Device device);

struct Injection {
  FaultPoint point;
  std::uint64_t nth;
  FaultPlan::Extent extent;
};

// How often a run without faults asks each point: the offloader's making and two steps.
[[nodiscard]] std::vector<std::uint64_t> count_calls(const Setting& setting, Step& step);

// Makes an offloader and runs a step while the fault is planned; then a step without it. Right is: exact gradients, or
// one typed error, of the refusal; no weight lost; all bytes back; no CUDA error left behind; an exact next step.
struct Verdict {
  std::optional<std::string> wrong;  // what was not right
  bool made = false;                 // whether the call came that was to fail: some depend on the order of threads
};
[[nodiscard]] Verdict inject(const Setting& setting, Step& step, const Injection& injection,
                             const std::vector<at::Tensor>& expected);

}  // namespace ebb::faults

#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include "bench/step_shape.h"
#include "offload/options.h"

namespace ebb {

class DeviceMemory;

// What it took.
struct Trial {
  std::uint64_t peak_bytes = 0;
  double step_ms = 0;  // the median of the last two steps
};

// So many steps in a row of a new model and a new offloader (config_options' `config` over `options`), all of which are
// gone afterwards. nullopt where the device's memory was not enough. `memory` must have been made before.
[[nodiscard]] std::optional<Trial> try_training(const LlamaShape& shape, at::ScalarType dtype,
                                                const std::string& config, const Options& options, int steps,
                                                DeviceMemory& memory, c10::Device device);

}  // namespace ebb

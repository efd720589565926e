#pragma once

#include <cstdint>

#include <c10/core/Device.h>

#include "test/random/check.h"

namespace ebb::graphs {

// Case `number` of `seed`: always the same. Lines are tried out as they are chosen, with plain autograd on the CPU, and
// taken if they can be computed, stay small and give finite values: a gradient of NaN would hide a wrong one.
[[nodiscard]] Case generate(std::uint64_t seed, std::uint64_t number, c10::Device device);

}  // namespace ebb::graphs

#pragma once

#include <ATen/core/Tensor.h>

#include "test/offload/parity.h"

namespace ebb {

// Forwards for tests that need some network and do not care which. Among their saves are inputs, outputs and leaves.

// A linear layer: its sigmoid times the sine of its input.
[[nodiscard]] at::Tensor layer(Inputs& in, const at::Tensor& x);

// Such layers, one after the other.
[[nodiscard]] at::Tensor two_layers(Inputs& in);
[[nodiscard]] at::Tensor three_layers(Inputs& in);

// Two layers with tanh instead of sigmoid.
[[nodiscard]] at::Tensor two_tanh_layers(Inputs& in);

}  // namespace ebb

#pragma once

#include <functional>

#include <ATen/core/Tensor.h>

namespace ebb {

// One of the equal parts that a model puts in a row. The part owns what it captures, so that it may run again in
// backward.
using ModelPart = std::function<at::Tensor(const at::Tensor&)>;

// Runs a part, checkpointed or not.
using PartRunner = std::function<at::Tensor(const ModelPart&, const at::Tensor&)>;

inline at::Tensor run_part(const ModelPart& part, const at::Tensor& x) { return part(x); }

}  // namespace ebb

#pragma once

#include <ATen/core/Tensor.h>

namespace ebb {

// As bytes: at::equal takes +0 for -0, and no NaN for itself.
inline bool same_bits(const at::Tensor& a, const at::Tensor& b) {
  return a.contiguous().view(at::kByte).equal(b.contiguous().view(at::kByte));
}

}  // namespace ebb

#pragma once

#include <optional>

#include <ATen/core/Tensor.h>

namespace ebb {

// The result of an RMS norm, from what its node has saved: weight * (rstd * x), in the precision of rstd and rounded
// once. The bits are those of LibTorch's kernels (aten/src/ATen/native/cuda/layer_norm_kernel.cu).
//
// Note [A kernel of our own]
// No operator of LibTorch computes this result from rstd. The norm itself wants epsilon, which its node has not saved.
// Elementwise operations mix dtypes and broadcast, for which they take six times as long (0.28 instead of 0.04 ms for
// 64 MiB of bfloat16 on an H100). The kernel is compiled by NVRTC, which LibTorch brings along, when it is first
// wanted; that takes a fraction of a second.
//
// `x`: on a CUDA device, floating point. `rstd`: one number for each row of x. `weight`: one number for each column of
// x, of x's dtype; undefined for none. The result is contiguous. nullopt where the kernel cannot be had: no NVRTC, a
// device older than sm_80, an unknown dtype. Threads: any. Work is given to the current stream.
[[nodiscard]] std::optional<at::Tensor> scale_rows(const at::Tensor& x, const at::Tensor& rstd,
                                                   const at::Tensor& weight);

}  // namespace ebb

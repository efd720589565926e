#pragma once

#include <optional>

#include <ATen/core/Tensor.h>

namespace ebb {

// What an RMS norm makes of its input, from what its node has saved: weight * (rstd * x), in the precision of rstd and
// rounded once, as LibTorch's kernels do (aten/src/ATen/native/cuda/layer_norm_kernel.cu), to the bit.
//
// Note [A kernel of our own]
// No operator of LibTorch computes that from rstd: the norm itself wants epsilon, which its node has not saved, and
// elementwise operations mix dtypes and broadcast, for which they take six times as long (0.28 instead of 0.04 ms for
// 64 MiB of bfloat16 on an H200). It is compiled by NVRTC, which LibTorch brings along, when it is first wanted: a
// fraction of a second.
//
// `x`: of a CUDA device, floating point. `rstd`: one number for each row of x. `weight`: one for each of its columns,
// of x's dtype; undefined for none. The result is contiguous. nullopt where the kernel cannot be had: no NVRTC, a
// device older than sm_80, a dtype it does not know. Threads: any. Work is given to the current stream.
[[nodiscard]] std::optional<at::Tensor> scale_rows(const at::Tensor& x, const at::Tensor& rstd,
                                                   const at::Tensor& weight);

}  // namespace ebb

#pragma once

#include <functional>
#include <vector>

#include <ATen/core/Tensor.h>

namespace ebb {

// The function that checkpoint() runs in forward and again in backward.
using CheckpointedFunction = std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>&)>;

// Whether the second run is left, by an exception that is no std::exception, at the last save that backward can ask
// for. What comes behind, such as a block's last matmul, is then not computed again. An exception must be able to leave
// the function at any operation. Destructors, not later statements, must put back what the function changes for a while
// (a model's mode, a lock, frozen weights). With kNo the whole function runs a second time.
enum class EarlyStop : bool { kNo, kYes };

// Returns function(inputs), and autograd saves only the inputs. Backward runs the function a second time, just before
// backward first needs a tensor that the function saved. Each of these tensors is let go of once it has been used. The
// inputs are saved as any tensor is, so under an OffloadGuard they are offloaded. Gradients are those of plain
// autograd, bit for bit.
//
// The second run has the first run's autocast and, if the first run drew random numbers, the first run's random state.
// Afterwards both are put back. (Other threads must not draw from the default generators meanwhile, which the whole
// process shares.) The second run must save the same tensors in the same order, or backward throws c10::Error. Every
// function does so that its own run does not change. What the function captures must not change between the two runs,
// lives as long as the graph, and may see side effects twice. With EarlyStop::kYes the second run is left where nothing
// more is needed. An input that has been written to raises LibTorch's error. A function that runs backward over what it
// has computed itself gets c10::Error.
//
// Under the guard of an offloader with a plan (Options::device_budget), the plan decides for each save of an outermost
// region whether to keep, move or drop it. The function runs a second time only where a save was dropped. Without a
// plan, Stats::saved_on_device does not count what the second run saves.
//
// Regions may nest in each other and with guards, may be unpacked in any order and more than once (retain_graph), and
// may be differentiated twice. Every save inside a region belongs to the region, whatever guards the function enters;
// but under a plan what is saved under a NoOpGuard stays, and what is saved under another offloader's guard is that
// one's.
//
// Threads: any. The second run may be on a thread of the autograd engine; second runs of one region never overlap.
// Errors: what the function throws, from this call or from backward.
[[nodiscard]] std::vector<at::Tensor> checkpoint(CheckpointedFunction function, const std::vector<at::Tensor>& inputs,
                                                 EarlyStop early_stop = EarlyStop::kNo);

// Returns function(inputs), and lets the plan of the guard's offloader drop what the function saves. It is for what
// that plan does not see into: kernels of the program's own, compiled modules. Nothing is dropped before a second run
// in an earlier step has saved the same bytes, and no second run is made if an input has been written to since. Without
// a plan, inside of a checkpointed region and without gradients this is only a call. As for checkpoint(), a second run
// may see side effects twice.
[[nodiscard]] std::vector<at::Tensor> recomputable(CheckpointedFunction function,
                                                   const std::vector<at::Tensor>& inputs);

}  // namespace ebb

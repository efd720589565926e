#pragma once

#include <cstdint>
#include <memory>

#include <ATen/core/Tensor.h>

#include "offload/managed/postponed_work.h"

namespace ebb {

// Where work uses bytes. kHome: at home if that is possible by then, on whatever thread, and else on the device.
enum class WorkAt : std::uint8_t { kDevice, kHome };

// Puts work on these tensors off until any of them, or of their storages' other tensors, is used next (PostponedWork
// has the contract). On the device, the target and the first of `others` are there before the work begins. For work at
// home the copies home begin now, and nothing is fetched ahead of its use until the work is done.
//
// Returns null, and does nothing, unless all of them are managed and come and go: then no use can be missed. The same
// where one of `others` has the target's storage, which could not end then. Work on them that was put off before is
// done first in any case, and throws. Throws c10::Error in a CUDA graph's capture.
[[nodiscard]] std::shared_ptr<PostponedWork> postpone(
    const at::Tensor& target, at::TensorList others, PostponedWork::Work work, WorkAt at = WorkAt::kDevice,
    PostponedWork::TargetUse target_use = PostponedWork::TargetUse::kWritten);

// Throws c10::Error where the tensor is managed and its set's current stream captures a CUDA graph.
void refuse_capture(const at::Tensor& managed);

}  // namespace ebb

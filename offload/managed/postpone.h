#pragma once

#include <functional>
#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>

#include "offload/managed/postponed_work.h"

namespace ebb {

// Puts work on these tensors off until any of them, or of their storages' other tensors, is used next (PostponedWork
// has the contract). Returns false, and does nothing, unless all of them are managed and come and go: then no use can
// be missed. The same where one of `others` has the target's storage, which could not end then. Work on them that was
// put off before is done first, and throws. Throws c10::Error in a CUDA graph's capture.
[[nodiscard]] bool postpone(const at::Tensor& target, at::TensorList others,
                            std::function<void(const at::Tensor&, const std::vector<at::Tensor>&)> work,
                            PostponedWork::TargetUse target_use = PostponedWork::TargetUse::kWritten);

// As postpone(), for work that uses the bytes at home if that is possible by then, on this or on another thread. Their
// copies home begin now, and nothing is fetched ahead of its use until the work is done. Where the work is to use the
// bytes on the device, `prepare_on_device`, unless null, is called first, with the target and the first of `others`
// there: if it throws, the work has not begun, and the next use tries again. Work on these tensors that was put off
// before is done first in any case. Returns null where postpone() returns false.
[[nodiscard]] std::shared_ptr<PostponedWork> postpone_at_home(
    const at::Tensor& target, at::TensorList others, PostponedWork::Work work,
    PostponedWork::TargetUse target_use = PostponedWork::TargetUse::kWritten,
    std::function<void()> prepare_on_device = nullptr);

// Throws c10::Error where the tensor is managed and its set's current stream captures a CUDA graph.
void refuse_capture(const at::Tensor& managed);

}  // namespace ebb

#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

namespace ebb {

// Runs an operation that works place by place on one part of its lists after the other, so that each part's managed
// storages are within the bound of their set, or of one place. Returns false, and does nothing, where all are within
// the bound, or where the lists are not of one length, about which the operation itself knows what to say.
[[nodiscard]] bool run_in_parts(const c10::OperatorHandle& operation, torch::jit::Stack& stack);

}  // namespace ebb

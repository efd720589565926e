#pragma once

#include <memory>

#include <torch/csrc/autograd/saved_variable_hooks.h>

namespace ebb {

// The hook for a save that a run of a checkpointed region (checkpoint.h) makes now on the calling thread; null if the
// save is left to what lies outside of regions.
[[nodiscard]] std::unique_ptr<torch::autograd::SavedVariableHooks> region_hook_here();

}  // namespace ebb

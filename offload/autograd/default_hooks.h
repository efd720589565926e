#pragma once

#include <cstddef>

#include <ATen/SavedTensorHooks.h>

namespace ebb {

// Note [The innermost wins]
// Python has default hooks of its own (torch.autograd.graph.saved_tensors_hooks, on which checkpointing, save_on_cpu
// and others are built), on a stack that is part of at::ThreadLocalState, as a guard is. A guard or a region notes how
// many hooks the stack had when the guard or region began. Where a save finds more hooks than that, they were set
// inside of the guard or region, and the save is theirs.

// How many default hooks are on the calling thread's stack.
[[nodiscard]] inline std::size_t default_hooks_here() {
  return at::SavedTensorDefaultHooks::get_tls_state().stack.size();
}

}  // namespace ebb

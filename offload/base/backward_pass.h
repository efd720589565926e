#pragma once

namespace ebb {

// The backward pass that the calling thread is running, as LibTorch numbers backward passes; -1 for none.
[[nodiscard]] int backward_here();

[[nodiscard]] inline bool in_backward() { return backward_here() != -1; }

}  // namespace ebb

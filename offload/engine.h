#pragma once

namespace ebb {

// Makes autograd ask the calling thread's innermost guard what to do with each tensor that it saves. Once for the whole
// process; later calls do nothing.
//
// Note [An engine of our own]
// LibTorch has no C++ way to set default saved-tensor hooks but this: `Engine::get_default_saved_variable_hooks` is
// virtual, and `set_default_engine_stub` installs a subclass (Python's engine does the same, so ebb cannot share a
// process with it). The engine is leaked: stopping it at process exit would wait for threads that may be gone.
void install_engine();

// The backward pass that the calling thread is running, as LibTorch numbers them; -1 for none.
int backward_here();

inline bool in_backward() { return backward_here() != -1; }

}  // namespace ebb

#pragma once

namespace ebb {

// Makes autograd ask the calling thread's innermost guard what to do with each tensor that it saves. Once for the whole
// process; later calls do nothing.
//
// Note [An engine that forwards]
// LibTorch has no C++ way to set default saved-tensor hooks but this: `Engine::get_default_saved_variable_hooks` is
// virtual, and `set_default_engine_stub` installs a subclass. The one of ebb answers that question under an
// OffloadGuard, and forwards everything else, the question elsewhere included, to the engine that was the default
// before: LibTorch's own, or Python's. So it runs no graph and has no threads, and device threads, reentrant backward
// passes, anomaly mode and callbacks are those of the other engine. It is leaked: autograd may run at any time, also at
// exit.
//
// Processes: a forked child keeps the engine.
void install_engine();

}  // namespace ebb

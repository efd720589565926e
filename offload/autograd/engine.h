#pragma once

namespace ebb {

// Makes autograd ask the calling thread's innermost guard what to do with each tensor that it saves. The first call
// installs an engine for the whole process; later calls do nothing.
//
// Note [An engine that forwards]
// LibTorch's only C++ way to set default saved-tensor hooks is the engine: `Engine::get_default_saved_variable_hooks`
// is virtual, and `set_default_engine_stub` installs a subclass. ebb's engine answers that call under an OffloadGuard
// and in a checkpointed region. ebb's engine forwards every other call to the engine that was the default before,
// LibTorch's own or Python's. So ebb's engine runs no graph and has no threads, and device threads, reentrant backward
// passes, anomaly mode and callbacks are those of the other engine. ebb's engine is leaked, because autograd may run at
// any time, also at exit.
//
// Processes: a forked child keeps the engine.
void install_engine();

}  // namespace ebb

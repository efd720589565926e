#pragma once

#include <cstdint>

namespace torch::autograd {
struct Engine;
}

namespace ebb {

// Which saved-tensor hook autograd gives a save by default.
enum class DefaultHooks : std::uint8_t {
  kNone,   // LibTorch's own engine: no hook at all
  kIdle,   // keeps the tensor that it gets: the cost of any hook. Leaks where an operation saves its own output
  kLeast,  // the least that is right in every program: an operation's own output without its history, and its version
           // checked
};

// Has autograd use these hooks while this object lives, whatever engine was installed before (Note [An engine that
// forwards] in offload/autograd/engine.h): hooks that are measured beside ebb must be installed as ebb's hooks are. A
// hook that is handed to SavedVariable::register_hooks costs more, because the save has been made without the hook by
// then.
//
// The first Offloader of a process installs ebb's engine, so that Offloader must be made before the first object of
// this class.
//
// Threads: one at a time in the process.
class DefaultHooksInForce {
 public:
  explicit DefaultHooksInForce(DefaultHooks which);
  ~DefaultHooksInForce();
  DefaultHooksInForce(const DefaultHooksInForce&) = delete;
  DefaultHooksInForce& operator=(const DefaultHooksInForce&) = delete;

 private:
  torch::autograd::Engine& before_;
};

}  // namespace ebb

#pragma once

#include <memory>
#include <mutex>

#include <c10/util/ThreadLocalDebugInfo.h>

namespace ebb {

class Core;
class Tape;

// What a guard puts on its thread: which offloader the saves go to (none for NoOpGuard), and which step they belong to.
//
// Note [The guard stack is LibTorch's]
// c10::ThreadLocalDebugInfo is a thread's stack of user information: the innermost entry wins, and it is part of
// at::ThreadLocalState, which autograd carries to its engine threads. A thread_local of our own would be invisible
// there, and saves made in a double backward would be missed.
class Scope final : public c10::DebugInfoBase {
 public:
  static constexpr auto kKind = static_cast<c10::DebugInfoKind>(0xEB);

  // null: leave saves to LibTorch.
  explicit Scope(std::shared_ptr<Core> core) : core_(std::move(core)) {}

  // The calling thread's innermost scope; null where saves are left to LibTorch.
  static Scope* current();

  [[nodiscard]] const std::shared_ptr<Core>& core() const { return core_; }

  // The step that a save made now belongs to. See Core::tape_of_this_thread.
  [[nodiscard]] std::shared_ptr<Tape> tape();

 private:
  const std::shared_ptr<Core> core_;
  std::mutex mutex_;
  std::shared_ptr<Tape> tape_;  // LOCK: mutex_
};

}  // namespace ebb

#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <string_view>

#include <c10/util/ThreadLocalDebugInfo.h>
#include <torch/csrc/autograd/saved_variable_hooks.h>

#include "offload/base/libtorch.h"
#include "streams/base/mutex.h"
#include "streams/base/process_mark.h"

namespace ebb {

class Runtime;
class SavedStep;

// The entry that a guard puts on its thread's stack: to which offloader saves go (none for NoOpGuard), and to which
// step they belong. A run of a checkpointed region puts such an entry there as well. Every save inside of the run
// belongs to the region, whatever guards the region's function enters.
//
// Note [The guard stack is LibTorch's]
// c10::ThreadLocalDebugInfo is a thread's stack of user information: the innermost entry wins, and the stack is part of
// at::ThreadLocalState, which autograd carries to its engine threads. A thread_local of ebb's own would be invisible
// there, and saves made in a double backward would be missed.
//
// Note [Scopes that have ended]
// Code that captures an at::ThreadLocalState (a backward pass, a hook, a task of the user's) captures the stack, and
// may restore the stack after some of its guards have ended. So a guard does not only take its scope off the stack: the
// scope itself ends. An ended scope lets go of its offloader, and is passed over for the next scope around it. Where
// each guard is made before the previous guard ends, a scope ends right below the top of the stack. That scope is taken
// out there, or the stack would grow for ever.
//
// Note [The innermost wins]
// Python has default hooks of its own (torch.autograd.graph.saved_tensors_hooks, on which checkpointing, save_on_cpu
// and others are built), on a stack that is part of at::ThreadLocalState, as a scope is. A scope notes how many hooks
// the stack had when the scope began. Where a save finds more hooks than that, they were set inside of the scope, and
// the save is theirs.
//
// Threads: every member may be called from any thread.
class GuardScope final : public c10::DebugInfoBase, public std::enable_shared_from_this<GuardScope> {
 public:
  static constexpr std::string_view kName = "ebb::GuardScope";
  static constexpr auto kKind = debug_info_kind(0xEB, &kName);

  struct Target;
  // Makes the hook of a save inside of a region's run; null if the save is left to LibTorch. `target`: where the save
  // would go outside of regions.
  using HookOf = std::function<std::unique_ptr<torch::autograd::SavedVariableHooks>(Target target)>;

  // Where a save made now goes.
  struct Target {
    std::shared_ptr<Runtime> runtime = nullptr;   // null: the save is left to LibTorch
    GuardScope* scope = nullptr;                  // on the calling thread's stack
    std::shared_ptr<const HookOf> run = nullptr;  // of the innermost region that runs; null for none
  };

  // Puts a scope on the calling thread's stack: a guard's (`runtime` null: leave saves to LibTorch), or with `hook_of`
  // that of a region's run. The scope ends with the result, on this thread and wherever the stack has been captured.
  // The end takes ended scopes off the calling thread's stack, and has the offloader's tier start the copies that the
  // tier has gathered into a batch.
  [[nodiscard]] static std::shared_ptr<const void> enter(std::shared_ptr<Runtime> runtime, HookOf hook_of = nullptr);

  // The calling thread's innermost guard and run that have not ended. A guard or run inside of which Python's default
  // hooks were set counts as none (Note [The innermost wins]).
  [[nodiscard]] static Target current();

  // The step that a save made now, for `runtime`, belongs to. See Steps::of_this_thread.
  [[nodiscard]] std::shared_ptr<SavedStep> step(const std::shared_ptr<Runtime>& runtime);

  struct Saving {
    std::shared_ptr<Runtime> runtime = nullptr;
    std::shared_ptr<SavedStep> step = nullptr;
  };
  // The step for which the calling thread began to save last, for whichever offloader. Empty where either has ended.
  [[nodiscard]] static Saving last_saving_here();

 private:
  using Stack = std::shared_ptr<c10::ThreadLocalDebugInfo>;

  GuardScope(std::shared_ptr<Runtime> runtime, HookOf hook_of);
  void leave();
  static GuardScope* innermost();
  static void drop_ended();
  void take_from_below_the_top();

  const ProcessMark process_;
  const std::size_t default_hooks_around_;
  Mutex mutex_;
  Stack below_ EBB_GUARDED_BY(mutex_);         // the thread's stack without this scope
  GuardScope* around_ EBB_GUARDED_BY(mutex_);  // the innermost scope in below_
  // The stack with this scope on top. Only to compare.
  const c10::ThreadLocalDebugInfo* with_it_ EBB_GUARDED_BY(mutex_) = nullptr;
  bool ended_ EBB_GUARDED_BY(mutex_) = false;
  std::shared_ptr<Runtime> runtime_ EBB_GUARDED_BY(mutex_);   // until the end, as the next
  std::shared_ptr<const HookOf> run_ EBB_GUARDED_BY(mutex_);  // null for a guard
  std::shared_ptr<SavedStep> step_ EBB_GUARDED_BY(mutex_);
};

}  // namespace ebb

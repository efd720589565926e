#pragma once

#include <memory>

namespace ebb {

class Runtime;
class SavedStep;

// Lives while a thread runs a backward pass from its beginning to its end: starts the first copies in before the pass
// asks for anything, if that pays (Note [Before the first use] in stall_monitor.h), and gives up what it fetched for a
// graph on which backward then did not run. A step is tried once.
//
// Which graph that will be is a guess: the last one for which the thread began to save, for whichever offloader. A
// wrong one costs time only, and so does one that cannot be made.
class EarlyPrefetch {
 public:
  // The thread's saves belong to this step from now on.
  static void expect(const std::shared_ptr<Runtime>& runtime, const std::shared_ptr<SavedStep>& step);

  EarlyPrefetch() noexcept;
  ~EarlyPrefetch();
  EarlyPrefetch(const EarlyPrefetch&) = delete;
  EarlyPrefetch& operator=(const EarlyPrefetch&) = delete;

  // The pass has failed, though no exception is under way.
  void fail() { failed_ = true; }

 private:
  void start();

  std::shared_ptr<Runtime> runtime_;  // null unless the thread has saves that backward may use
  std::shared_ptr<SavedStep> step_;   // as runtime_
  bool fetched_ = false;              // copies may have been started
  bool failed_ = false;
  int exceptions_;  // under way when it began
};

}  // namespace ebb

#pragma once

#include <memory>

namespace ebb {

class Runtime;
class SavedStep;

// A scope around one backward pass of a thread. The constructor starts the first copies in before the pass asks for
// anything, if an early start pays (Note [Before the first use] in stall_monitor.h). The destructor cancels these
// prefetches if backward did not run on the graph for which they were made. Each step is tried once.
//
// The pass is expected to run on the last graph for which the thread began to save, for whichever offloader. A wrong
// expectation costs time only, and so does a prefetch that fails.
class EarlyPrefetch {
 public:
  // Says that the calling thread's saves belong to `step` from now on.
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
  int exceptions_;  // how many were under way when this was made
};

}  // namespace ebb

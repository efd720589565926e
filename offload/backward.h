#pragma once

#include <memory>

namespace ebb {

// A scope around one backward pass of the calling thread: made before the pass begins, destroyed when the pass is over.
// The engine that ebb installs makes a Backward for each pass that goes through LibTorch's default engine. Python's
// backward calls Python's own engine, so a binding of ebb makes a Backward for each of those passes. A Backward inside
// another is harmless.
//
// Without a Backward no plan is made for a budget, and no copy in starts before the first unpack. A gradient may then
// take over the memory of a saved tensor that a backward returns (Note [Lent tensors] in lent_tensor.h): writing to the
// gradient would write to the saved tensor.
//
// Threads: made and destroyed on the thread of the pass. The destructor may wait for the device, and takes the lock
// under which policies are called: that thread must not hold an interpreter's lock (interpreter.h).
class Backward {
 public:
  Backward();
  ~Backward();
  Backward(const Backward&) = delete;
  Backward& operator=(const Backward&) = delete;

  // Says that the pass has failed. Not needed where an exception ends this scope.
  void fail();

 private:
  struct Pass;
  const std::unique_ptr<Pass> pass_;
};

}  // namespace ebb

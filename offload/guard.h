#pragma once

#include <memory>

namespace ebb {

class Offloader;

// While an OffloadGuard lives, tensors that autograd saves on its thread go through the offloader. Saves that
// autograd's engine threads make for a backward called under the guard (double backward) go there, too. Guards nest;
// the innermost wins. The guard of an offloader that is switched off has no effect: a guard around it stays in force.
// The guard may end, or the offloader be destroyed, before backward: what was saved comes back all the same.
//
// Streams: a saved tensor's memory is taken to belong to the stream that is current at the save. Memory that belongs to
// another stream must be known to the current stream by record_stream, as for any other asynchronous use.
//
// Note [Guards neither copy nor move]
// A guard belongs to the thread and the scope where it begins. A guard that is destroyed on another thread, or before a
// guard inside it, does no harm. It is then no longer in force on any thread, and the other guards stay as they are.
class OffloadGuard {
 public:
  [[nodiscard]] explicit OffloadGuard(Offloader& offloader);
  ~OffloadGuard();
  OffloadGuard(const OffloadGuard&) = delete;
  OffloadGuard& operator=(const OffloadGuard&) = delete;

 private:
  const std::shared_ptr<const void> scope_;  // ends with the guard; null if the offloader is switched off
};

// While a NoOpGuard lives, saves on its thread are left to LibTorch. An example is the output head, whose saves
// backward wants at once. See Note [Guards neither copy nor move].
class NoOpGuard {
 public:
  [[nodiscard]] NoOpGuard();
  ~NoOpGuard();
  NoOpGuard(const NoOpGuard&) = delete;
  NoOpGuard& operator=(const NoOpGuard&) = delete;

 private:
  const std::shared_ptr<const void> scope_;  // ends with the guard
};

}  // namespace ebb

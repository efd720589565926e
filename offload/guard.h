#pragma once

#include <memory>

namespace ebb {

class Offloader;
class GuardScope;

// While it lives, tensors that autograd saves on this thread go through the offloader. So do saves that autograd's
// engine threads make for a backward called under it (double backward). Guards nest; the innermost wins. The guard of
// an offloader that is switched off is no guard at all. Leaving the guard, or destroying the offloader, before backward
// is fine: what was saved comes back all the same.
//
// Streams: a saved tensor is taken to be owned by the stream that is current when it is saved. A tensor from another
// stream's memory must be known there, by record_stream, as it must for any other asynchronous use.
//
// Note [Guards neither copy nor move]
// A guard belongs to the thread and to the scope where it begins. One that is destroyed elsewhere, or before a guard
// inside it, does no harm: it is then no longer in force anywhere, and the other guards stay as they are.
class OffloadGuard {
 public:
  explicit OffloadGuard(Offloader& offloader);
  ~OffloadGuard();
  OffloadGuard(const OffloadGuard&) = delete;
  OffloadGuard& operator=(const OffloadGuard&) = delete;

 private:
  const std::shared_ptr<GuardScope> scope_;  // null if the offloader is switched off
};

// While it lives, saves on this thread are left to LibTorch: around the output head, say, whose saves backward wants
// at once. See Note [Guards neither copy nor move].
class NoOpGuard {
 public:
  NoOpGuard();
  ~NoOpGuard();
  NoOpGuard(const NoOpGuard&) = delete;
  NoOpGuard& operator=(const NoOpGuard&) = delete;

 private:
  const std::shared_ptr<GuardScope> scope_;
};

}  // namespace ebb

#include "offload/guard.h"

#include "offload/autograd/guard_scope.h"
#include "offload/offloader.h"
#include "offload/saving/runtime.h"
#include "offload/tensors/deferred_copies.h"

namespace ebb {

OffloadGuard::OffloadGuard(Offloader& offloader)
    : scope_(offloader.runtime() == nullptr ? nullptr : GuardScope::enter(offloader.runtime())) {}

OffloadGuard::~OffloadGuard() {
  if (scope_ != nullptr) {
    DeferredCopies::of_this_thread().start_all();
    scope_->flush();
    scope_->leave();
  }
}

NoOpGuard::NoOpGuard() : scope_(GuardScope::enter(nullptr)) {}

NoOpGuard::~NoOpGuard() { scope_->leave(); }

}  // namespace ebb

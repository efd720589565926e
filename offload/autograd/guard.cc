#include "offload/guard.h"

#include "offload/autograd/scope.h"
#include "offload/offloader.h"
#include "offload/runtime/runtime.h"
#include "offload/tensors/put_off.h"

namespace ebb {

OffloadGuard::OffloadGuard(Offloader& offloader)
    : scope_(offloader.runtime() == nullptr ? nullptr : Scope::enter(offloader.runtime())) {}

OffloadGuard::~OffloadGuard() {
  if (scope_ != nullptr) {
    PutOff::of_this_thread().start_all();
    scope_->flush();
    scope_->leave();
  }
}

NoOpGuard::NoOpGuard() : scope_(Scope::enter(nullptr)) {}

NoOpGuard::~NoOpGuard() { scope_->leave(); }

}  // namespace ebb

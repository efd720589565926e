#include "offload/guard.h"

#include <c10/util/ThreadLocalDebugInfo.h>

#include "offload/core.h"
#include "offload/offloader.h"
#include "offload/put_off.h"
#include "offload/scope.h"

namespace ebb {

struct OffloadGuard::Slot {
  explicit Slot(std::shared_ptr<Core> core) : guard(Scope::kKind, std::make_shared<Scope>(std::move(core))) {}
  c10::DebugInfoGuard guard;
};

struct NoOpGuard::Slot {
  c10::DebugInfoGuard guard{Scope::kKind, std::make_shared<Scope>(nullptr)};
};

OffloadGuard::OffloadGuard(Offloader& offloader)
    : slot_(offloader.core_ == nullptr ? nullptr : std::make_unique<Slot>(offloader.core_)) {}

OffloadGuard::~OffloadGuard() { PutOff::of_this_thread().start_all(); }

NoOpGuard::NoOpGuard() : slot_(std::make_unique<Slot>()) {}

NoOpGuard::~NoOpGuard() = default;

}  // namespace ebb

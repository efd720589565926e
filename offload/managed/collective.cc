#include "offload/managed/collective.h"

#include <utility>
#include <vector>

#include <ATen/core/ivalue_inl.h>
#include <c10/util/Exception.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/custom_class.h>

#include "streams/base/mutex.h"
#include "streams/base/process_mark.h"

namespace ebb {
namespace {

c10::intrusive_ptr<c10d::Work> work_of(const c10::IValue& result) {
  static const auto type = c10::getCustomClassType<c10::intrusive_ptr<c10d::Work>>();
  return result.isObject() && *result.type() == *type ? result.toCustomClass<c10d::Work>() : nullptr;
}

c10::intrusive_ptr<c10::ivalue::Future> future_of(c10d::Work& work) {
  try {
    return work.getFuture();
  } catch (const c10::Error&) {  // a backend need not have one
    return nullptr;
  }
}

// Works that cannot tell when they are over: gloo's send and recv, each of which may be waited for once only. The
// program holds a work until it has waited, so a work that nobody else holds is over.
struct UntoldWorks {
  struct Each {
    c10::intrusive_ptr<c10d::Work> work;
    std::shared_ptr<const void> uses;
  };

  Mutex mutex;
  std::vector<Each> all EBB_GUARDED_BY(mutex);
};

// Lets go of those that are over, too.
void hold_until_over(c10::intrusive_ptr<c10d::Work> work, const std::shared_ptr<const void>& uses) {
  UntoldWorks& works = PerProcess<UntoldWorks>::here();
  std::vector<UntoldWorks::Each> held{{std::move(work), uses}};
  const MutexLock lock(works.mutex);
  held.swap(works.all);  // what is over is destroyed after the lock is released
  for (UntoldWorks::Each& each : held) {
    if (each.work.use_count() > 1) {
      works.all.push_back(std::exchange(each, {}));
    }
  }
}

}  // namespace

void end_with_works(c10::ArrayRef<c10::IValue> results, const std::shared_ptr<const void>& uses) {
  for (const c10::IValue& result : results) {
    const c10::intrusive_ptr<c10d::Work> work = work_of(result);
    if (work == nullptr) {
      continue;
    }
    if (uses == nullptr) {
      work->wait();
    } else if (const auto future = future_of(*work)) {
      future->addCallback([uses](const c10::ivalue::Future& /*over*/) {});
    } else {
      hold_until_over(work, uses);
    }
  }
}

}  // namespace ebb

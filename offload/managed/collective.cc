#include "offload/managed/collective.h"

#include <algorithm>
#include <iterator>
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
class Watched {
 public:
  static Watched& all() { return PerProcess<Watched>::here(); }

  // Lets go of what is over, too.
  void add(c10::intrusive_ptr<c10d::Work> work, std::shared_ptr<const void> uses) {
    std::vector<Entry> over;  // destroyed after the lock is released
    const MutexLock lock(mutex_);
    const auto first_over =
        std::partition(entries_.begin(), entries_.end(), [](const Entry& each) { return each.work.use_count() > 1; });
    over.assign(std::make_move_iterator(first_over), std::make_move_iterator(entries_.end()));
    entries_.erase(first_over, entries_.end());
    entries_.push_back({std::move(work), std::move(uses)});
  }

 private:
  struct Entry {
    c10::intrusive_ptr<c10d::Work> work;
    std::shared_ptr<const void> uses;
  };

  Mutex mutex_;
  std::vector<Entry> entries_ EBB_GUARDED_BY(mutex_);
};

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
      Watched::all().add(work, uses);
    }
  }
}

}  // namespace ebb

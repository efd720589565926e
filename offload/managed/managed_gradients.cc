#include "offload/managed/managed_gradients.h"

#include <cstddef>
#include <unordered_map>
#include <utility>
#include <vector>

#include <c10/core/Stream.h>
#include <c10/core/StreamGuard.h>
#include <torch/csrc/autograd/engine.h>

#include "offload/base/backward_pass.h"
#include "offload/base/gradient_hook.h"
#include "offload/base/managed_key.h"
#include "offload/managed/observed_operations.h"
#include "streams/base/mutex.h"

namespace ebb {
namespace {

using WeakTensor = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;

// Whoever else holds the gradient may read its memory without an operation, as a DLPack capsule does, and whoever else
// holds its storage may do so through a tensor that is not observed. An object of Python's, which holds the gradient as
// well, leads to operations only.
bool can_be_managed(const at::Tensor& gradient, const ManagedSet& set) {
  if (!gradient.defined() || is_managed(gradient) || !set.takes(gradient) || gradient.requires_grad()) {
    return false;
  }
  constexpr std::size_t kLeafAndArgument = 2;
  const bool has_python_object = gradient.unsafeGetTensorImpl()->pyobj_slot()->load_pyobj() != nullptr;
  return gradient.use_count() <= kLeafAndArgument + (has_python_object ? 1 : 0) && gradient.storage().use_count() == 1;
}

// The gradients, of all sets, that are whole and not managed yet. A backward pass manages those of its own alone: once
// another pass is over, its thread may be reading them.
class WholeGradients {
 public:
  struct Whole {
    WeakTensor gradient;
    std::weak_ptr<ManagedSet> set;
    ManagedSet::Slot slot;
    c10::Stream stream;  // of the work that the gradient became whole by
  };

  static WholeGradients& all() {
    static auto* const gradients = new WholeGradients;  // backward passes run until the process has ended
    return *gradients;
  }

  // Manages those that the present pass has added before, and adds one.
  void add(Whole whole) {
    const int pass = backward_here();
    bool is_first = false;
    std::vector<Whole> before;
    std::unordered_map<int, std::vector<Whole>> of_failed;  // destroyed after the lock is released
    {
      const MutexLock lock(mutex_);
      is_first = whole_.find(pass) == whole_.end();
      if (is_first && in_backward() &&
          backward_passes() <= 1) {  // others have failed: their gradients stay where they are
        of_failed.swap(whole_);
      }
      before = std::exchange(whole_[pass], {});
      whole_[pass].push_back(std::move(whole));
    }
    manage(std::move(before));
    if (is_first && in_backward()) {
      torch::autograd::Engine::get_default_engine().queue_callback([this, pass] { manage_all(pass); });
    }
  }

 private:
  void manage_all(int pass) {
    std::vector<Whole> whole;
    {
      const MutexLock lock(mutex_);
      if (const auto found = whole_.find(pass); found != whole_.end()) {
        whole = std::move(found->second);
        whole_.erase(found);
      }
    }
    manage(std::move(whole));
  }

  // Gradients that may not be managed now stay where they are.
  static void manage(std::vector<Whole> whole) {
    if (backward_passes() > 1) {  // another pass may be adding to one of them
      return;
    }
    for (const Whole& each : whole) {
      const std::shared_ptr<ManagedSet> set = each.set.lock();
      const at::Tensor gradient(each.gradient.lock());
      if (set == nullptr || !can_be_managed(gradient, *set)) {
        continue;
      }
      const c10::StreamGuard there(each.stream);  // this leaf's accumulation may be on another
      try_to_manage(set, gradient, each.slot);
    }
  }

  Mutex mutex_;
  std::unordered_map<int, std::vector<Whole>> whole_ EBB_GUARDED_BY(mutex_);  // by pass, as backward_here() numbers it
};

}  // namespace

void manage_gradients(const std::shared_ptr<ManagedSet>& set, const at::Tensor& leaf) {
  after_each_gradient(leaf, set.get(), [weak = std::weak_ptr(set), slot = set->make_slot()](const at::Tensor& here) {
    const std::shared_ptr<ManagedSet> there = weak.lock();
    if (there != nullptr && here.grad().defined()) {  // a call before this may have used the gradient up
      const c10::Stream stream = there->residency().tier().current_stream();
      WholeGradients::all().add({WeakTensor(here.grad().getIntrusivePtr()), weak, slot, stream});
    }
  });
}

}  // namespace ebb

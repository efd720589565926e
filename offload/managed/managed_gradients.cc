#include "offload/managed/managed_gradients.h"

#include <atomic>
#include <cstddef>
#include <iterator>
#include <unordered_map>
#include <utility>
#include <vector>

#include <c10/core/Stream.h>
#include <c10/core/StreamGuard.h>
#include <torch/csrc/autograd/engine.h>

#include "offload/base/backward_pass.h"
#include "offload/base/gradient_hook.h"
#include "offload/base/libtorch_members.h"
#include "offload/base/managed_key.h"
#include "offload/base/references.h"
#include "offload/managed/manage.h"
#include "offload/managed/registry.h"
#include "streams/base/mutex.h"
#include "streams/base/process_mark.h"

namespace ebb {
namespace {

using WeakTensor = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;

// Whoever else holds the gradient may read its memory without an operation, as a DLPack capsule does, and whoever else
// holds its storage may do so through a tensor that is not observed. An object of Python's, which holds the gradient as
// well, leads to operations only. A save of ebb's knows the storage weakly, where backward has handed out the save's
// bytes and a leaf has taken these over: the save would hand them out again.
bool is_the_leafs_alone(const at::Tensor& gradient) {
  constexpr std::size_t kLeafAndArgument = 2;
  constexpr std::size_t kOwnersRegistrysAndThis = 3;
  if (gradient.storage().getWeakStorageImpl().weak_use_count() > kOwnersRegistrysAndThis) {
    return false;
  }
  const bool has_python_object = gradient.unsafeGetTensorImpl()->pyobj_slot()->load_pyobj() != nullptr;
  return gradient.use_count() <= kLeafAndArgument + (has_python_object ? 1 : 0) &&
         references_to(gradient.storage()) == 1;
}

// The gradients, of all sets, that are whole and not managed yet, by the backward pass that has made them.
class WholeGradients {
 public:
  struct Whole {
    WeakTensor gradient;
    std::weak_ptr<ManagedSet> set;
    ManagedSet::Slot slot;
    c10::Stream stream;  // of the work that the gradient became whole by
  };

  static WholeGradients& all() { return PerProcess<WholeGradients>::here(); }

  // Manages those that the present pass has added before, and adds one.
  void add(Whole whole) {
    const int pass = backward_here();
    std::vector<Whole> in_use = manage(take(pass, Ends::kNo));
    bool is_first = false;
    {
      const MutexLock lock(mutex_);
      const auto [of_pass, is_new] = whole_.try_emplace(pass);
      is_first = is_new;
      in_use.push_back(std::move(whole));
      std::ranges::move(in_use, std::back_inserter(of_pass->second));
    }
    if (is_first && in_backward()) {
      // The callbacks of a pass that fails are not called, but end with the pass.
      const std::shared_ptr<void> forgets(nullptr,
                                          [pass](void* /*none*/) { static_cast<void>(all().take(pass, Ends::kYes)); });
      torch::autograd::Engine::get_default_engine().queue_callback([pass, forgets] {
        static_cast<void>(manage(all().take(pass, Ends::kYes)));
      });  // a forked child has another all()
    }
  }

 private:
  enum class Ends : bool { kNo, kYes };

  std::vector<Whole> take(int pass, Ends ends) {
    std::vector<Whole> taken;
    const MutexLock lock(mutex_);
    if (const auto found = whole_.find(pass); found != whole_.end()) {
      taken.swap(found->second);
      if (ends == Ends::kYes) {
        whole_.erase(found);
      }
    }
    return taken;
  }

  // Returns those that operations are using. What cannot be managed stays where it is.
  static std::vector<Whole> manage(std::vector<Whole> whole) {
    std::vector<Whole> in_use;
    for (Whole& each : whole) {
      const std::shared_ptr<ManagedSet> set = each.set.lock();
      const at::Tensor gradient(each.gradient.lock());
      if (set == nullptr || !gradient.defined() || !set->takes(gradient) || has_home(gradient) ||
          !is_the_leafs_alone(gradient)) {
        continue;
      }
      const c10::StreamGuard there(each.stream);  // this leaf's accumulation may be on another
      if (!try_to_manage(set, gradient, each.slot)) {
        in_use.push_back(std::move(each));
      }
    }
    return in_use;
  }

  Mutex mutex_;
  std::unordered_map<int, std::vector<Whole>> whole_ EBB_GUARDED_BY(mutex_);  // by pass, as backward_here() numbers it
};

// Has operations on the tensor be observed from now on, so that manage() knows of those under way. The storage stays
// where it is. Returns false, and does nothing, where an operation that is not observed may be using the tensor:
// somebody else refers to it than the caller and one more.
bool watch(const std::shared_ptr<ManagedSet>& set, const at::Tensor& tensor) {
  if (is_managed(tensor)) {
    return true;
  }
  if (const auto by = Registry::all().find(tensor.storage().unsafeGetStorageImpl()).set; by != nullptr && by != set) {
    return false;
  }
  manage_around(set, tensor);
  // Whoever gets the tensor after this sees the key, and whoever has got it before is counted here.
  std::atomic_thread_fence(std::memory_order_seq_cst);
  constexpr std::size_t kCallersAndOneMore = 2;
  if (references_to(tensor) > kCallersAndOneMore) {
    key_set_of(tensor) = tensor.key_set() - c10::DispatchKeySet(kManagedKey);
    return false;
  }
  return true;
}

}  // namespace

void manage_gradients(const std::shared_ptr<ManagedSet>& set, const at::Tensor& leaf) {
  after_each_gradient(
      leaf, set.get(),
      [weak = std::weak_ptr(set), slot = ManagedSet::Slot()](const at::Tensor& here) mutable {
        const std::shared_ptr<ManagedSet> there = weak.lock();
        const at::Tensor gradient = here.grad();
        if (there == nullptr || there->residency().forked() ||
            !gradient.defined() ||  // a call before this may have used the gradient up
            gradient.requires_grad() || !there->takes(gradient) || has_home(gradient) || !watch(there, gradient)) {
          return;
        }
        if (slot == nullptr) {
          slot = there->make_slot();
        }
        const c10::Stream stream = there->residency().tier().current_stream();
        WholeGradients::all().add({WeakTensor(gradient.getIntrusivePtr()), weak, slot, stream});
      },
      WhenCalled::kBeforeToo);
}

}  // namespace ebb

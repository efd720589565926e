#include "offload/tensors/lent_tensor.h"

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <thread>
#include <typeinfo>
#include <utility>
#include <vector>

#include <ATen/SequenceNumber.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/function.h>

#include "offload/base/autograd_info.h"
#include "offload/base/references.h"
#include "streams/base/mutex.h"
#include "streams/base/process_mark.h"

namespace ebb {
namespace {

using Impl = c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;

const torch::autograd::Node* current_node() { return torch::autograd::get_current_node().get(); }

struct Entry {
  Impl tensor;          // null if AccumulateGrad may take it over; always null for Handing::kCopied
  WeakTensor handed;    // the same tensor
  c10::Storage memory;  // of the tensor
  LentFrom from;        // `saved` is null once nobody has that tensor, whose version counter it keeps alive
  const torch::autograd::Node* node;  // to which the tensor was lent. Only to compare
  std::thread::id thread;             // on which the node ran
  bool is_nobodys = false;            // may_be_taken_over; from then on `tensor` and `from.saved` are null

  [[nodiscard]] bool is_unused() const { return tensor ? references_to(tensor) == 1 : handed.use_count() == 0; }

  // Whether nobody has the saved tensor, nor a save of it: AccumulateGrad would then take it over without hooks, too.
  [[nodiscard]] bool may_be_taken_over() const {
    return is_nobodys || (from.saved.expired() && from.saved.weak_use_count() == 1);
  }

  [[nodiscard]] bool is_of_this_thread() const { return thread == std::this_thread::get_id(); }
};

// The lent tensors of the whole process to which ebb refers: a tensor may be lent on one thread and let go of on
// another.
//
// Threads: every member may be called from any thread. Tensors are destroyed outside of the lock, because their end may
// end a graph.
class Lent {
 public:
  static Lent& all() { return PerProcess<Lent>::here(); }

  void add(const Impl& tensor, Handing handing, LentFrom from) {
    if (passes_ == 0) {  // no backward pass takes the tensor over
      return;
    }
    const MutexLock lock(mutex_);
    entries_.push_back({handing == Handing::kCopied ? Impl() : tensor, WeakTensor(tensor), tensor->unsafe_storage(),
                        std::move(from), current_node(), std::this_thread::get_id()});
    count_ = entries_.size();
  }

  // Lets go of some of the entries that are done, and then of some that may be taken over. Each call looks at a bounded
  // number of entries, and the next call goes on from there, so that every entry is reached however many live.
  Memories sweep(const void* ending) noexcept {
    if (count_ == 0) {
      return {};
    }
    let_go_of_done(ending);  // these end first: they share version counters with the others
    return let_go_of_nobodys(/*release=*/ending != nullptr);
  }

  // Frees memory only. The tensors stay, because the last reference to a tensor may own a graph.
  void free_unused() noexcept {
    static const c10::Storage none(c10::Storage::use_byte_size_t(), 0, c10::DataPtr(nullptr, c10::kCPU));
    if (count_ == 0) {
      return;
    }
    c10::SmallVector<c10::Storage, 2 * kAtOnce> unused;  // freed after the lock is released
    const MutexLock lock(mutex_);
    for (Entry& entry : entries_) {
      if (unused.size() + 2 > unused.capacity()) {
        return;
      }
      if (!entry.is_unused() || !entry.memory || !may_refer_to(*entry.memory.unsafeGetStorageImpl())) {
        continue;
      }
      unused.push_back(std::exchange(entry.memory, {}));
      if (entry.tensor) {
        unused.push_back(entry.tensor->unsafe_storage());
        entry.tensor->set_allow_tensor_metadata_change(true);
        entry.tensor->set_storage_keep_dtype(none);
      }
    }
  }

  void begin_pass() { ++passes_; }

  void end_pass() noexcept {
    std::vector<Entry> done;  // destroyed after the lock is released
    if (--passes_ != 0) {
      return;
    }
    const MutexLock lock(mutex_);
    if (passes_ == 0) {  // else another pass has begun since, whose tensors these may be
      done.swap(entries_);
      count_ = 0;
    }
  }

 private:
  static constexpr std::size_t kAtOnce = 16;
  static constexpr std::size_t kMost = 64;
  static constexpr std::size_t kMany = 1024;  // a node that asks for its saves without end must not be lent without end

  void let_go_of_done(const void* ending) noexcept {
    const torch::autograd::Node* const running = current_node();  // where a save ends, the save's node, which has run
    c10::SmallVector<Entry, kAtOnce> done;                        // destroyed after the lock is released
    const MutexLock lock(mutex_);
    const bool many = entries_.size() > kMany;
    const auto is_done = [&](const Entry& entry) {
      const bool is_ending = ending == nullptr ? many : entry.from.save == ending;
      return entry.is_unused() && entry.is_of_this_thread() && (is_ending || entry.node != running);
    };
    const std::size_t most = std::min(kMost, entries_.size());
    for (std::size_t i = 0; i < most && done.size() < kAtOnce; ++i) {
      next_ = next_ < entries_.size() ? next_ : 0;
      Entry& entry = entries_[next_];
      if (!is_done(entry)) {
        ++next_;
        continue;
      }
      done.push_back(std::move(entry));
      if (next_ + 1 != entries_.size()) {
        entry = std::move(entries_.back());
      }
      entries_.pop_back();
    }
    count_ = entries_.size();
  }

  // `release`: whether to return memory, of the calling thread's tensors that may be taken over and share their version
  // counter with nothing. (Another thread may be changing its tensors.)
  Memories let_go_of_nobodys(bool release) noexcept {
    Memories released;
    c10::SmallVector<Impl, kAtOnce> let_go;  // destroyed after the lock is released
    const MutexLock lock(mutex_);
    const std::size_t most = std::min(kMost, entries_.size());
    for (std::size_t i = 0; i < most && std::max(let_go.size(), released.size()) < kAtOnce; ++i) {
      next_to_take_over_ = next_to_take_over_ < entries_.size() ? next_to_take_over_ : 0;
      Entry& entry = entries_[next_to_take_over_++];
      if (!entry.may_be_taken_over()) {
        continue;
      }
      if (!std::exchange(entry.is_nobodys, true)) {
        let_go.push_back(std::exchange(entry.tensor, {}));
        entry.from.saved = WeakTensor(Impl());  // the saved tensor has ended already: this ends no graph
      }
      if (release && !entry.from.is_view && entry.memory && entry.is_of_this_thread()) {
        // Not made a strong reference under the lock (Note [The interpreter's lock]): what has ended keeps its version
        // counter for as long as the weak reference lives.
        if (!entry.handed.expired() && entry.handed._unsafe_get_target()->unique_version()) {
          released.push_back(std::exchange(entry.memory, {}));
        }
      }
    }
    return released;
  }

  std::atomic<std::size_t> count_{0};
  std::atomic<std::int64_t> passes_{0};
  Mutex mutex_;
  std::vector<Entry> entries_ EBB_GUARDED_BY(mutex_);
  std::size_t next_ EBB_GUARDED_BY(mutex_) = 0;               // the next that let_go_of_done looks at
  std::size_t next_to_take_over_ EBB_GUARDED_BY(mutex_) = 0;  // the next that let_go_of_nobodys looks at
};

class LentTensorImpl final : public c10::TensorImpl {
 public:
  LentTensorImpl(const c10::TensorImpl& like, Handing handing, LentFrom from)
      : TensorImpl(like.key_set(), like.dtype(), like.device()), handing_(handing), from_(std::move(from)) {
    copy_tensor_metadata(&like, this, like.version_counter(), /*allow_tensor_metadata_change=*/true);  // and storage
  }

  c10::intrusive_ptr<TensorImpl> shallow_copy_and_detach(const c10::VariableVersion& version_counter,
                                                         bool allow_tensor_metadata_change) const override {
    return referred_to(TensorImpl::shallow_copy_and_detach(version_counter, allow_tensor_metadata_change));
  }

  c10::intrusive_ptr<TensorImpl> shallow_copy_and_detach(c10::VariableVersion&& version_counter,
                                                         bool allow_tensor_metadata_change) const override {
    return referred_to(TensorImpl::shallow_copy_and_detach(std::move(version_counter), allow_tensor_metadata_change));
  }

 private:
  [[nodiscard]] c10::intrusive_ptr<TensorImpl> referred_to(c10::intrusive_ptr<TensorImpl> copy) const {
    Lent::all().add(copy, handing_, from_);
    return copy;
  }

  const Handing handing_;
  const LentFrom from_;
};

}  // namespace

// The node that saves its own output is the newest of its thread.
Handing handing_of(const AutogradInfo& saved) {
  if (saved.is_leaf()) {
    return saved.requires_grad() ? Handing::kLent : Handing::kItself;
  }
  const auto& made_by = saved.grad_fn();
  const bool output = made_by != nullptr && made_by->sequence_nr() + 1 >= at::sequence_number::peek() &&
                      made_by->thread_id() == at::RecordFunction::currentThreadId();
  return output ? Handing::kCopied : Handing::kLent;
}

at::Tensor lend(const at::Tensor& tensor, c10::Storage storage, Handing handing, LentFrom from) {
  auto lent = c10::make_intrusive<LentTensorImpl>(*tensor.unsafeGetTensorImpl(), handing, std::move(from));
  lent->set_storage_keep_dtype(std::move(storage));
  return at::Tensor(Impl(std::move(lent)));
}

at::Tensor lend(const at::Tensor& tensor, Handing handing, LentFrom from) {
  const c10::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
  const bool dense = typeid(impl) == typeid(c10::TensorImpl) && tensor.has_storage();
  // A tensor that dispatches to Python is its Python object, which a lent tensor would not have.
  const bool is_pythons = impl.key_set().has(c10::DispatchKey::Python);
  return dense && !is_pythons ? at::Tensor(Impl(c10::make_intrusive<LentTensorImpl>(impl, handing, std::move(from))))
                              : tensor;
}

void refer_to_lent(const at::Tensor& tensor, LentFrom from) {
  Lent::all().add(tensor.getIntrusivePtr(), Handing::kItself, std::move(from));
}

Memories sweep_lent(const void* ending) noexcept { return Lent::all().sweep(ending); }

void free_unused_lent() noexcept { Lent::all().free_unused(); }

LendingPass::LendingPass() { Lent::all().begin_pass(); }

LendingPass::~LendingPass() {
  if (!process_.forked()) {  // else there is nothing to end
    Lent::all().end_pass();
  }
}

}  // namespace ebb

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
  Impl tensor;                        // null if AccumulateGrad may take it over; always null for Handing::kCopied
  WeakTensor handed;                  // the same tensor
  c10::Storage memory;                // of the tensor
  WeakTensor saved;                   // null once nobody has the saved tensor, whose version counter this keeps alive
  const torch::autograd::Node* node;  // to which the tensor was lent. Only to compare
  std::thread::id thread;             // on which the node ran
  const void* save;                   // LentFrom::save
  bool is_view;                       // LentFrom::is_view
  bool is_nobodys = false;            // may_be_taken_over; from then on `tensor` and `saved` are null

  [[nodiscard]] bool is_unused() const { return tensor ? references_to(tensor) == 1 : handed.use_count() == 0; }

  // Whether nobody has the saved tensor, nor a save of it: AccumulateGrad would then take it over without hooks, too.
  [[nodiscard]] bool may_be_taken_over() const {
    return is_nobodys || (saved.expired() && saved.weak_use_count() == 1);
  }

  // Whether the entry's node has run, on this thread. A running node may ask again for a tensor that it has let go of.
  [[nodiscard]] bool is_behind(const torch::autograd::Node* running) const {
    return is_of_this_thread() && node != running;
  }
  [[nodiscard]] bool is_of_this_thread() const { return thread == std::this_thread::get_id(); }
};

}  // namespace

// The lent tensors of the whole process to which ebb refers: a tensor may be lent on one thread and let go of on
// another.
//
// Threads: every member may be called from any thread. Tensors are destroyed outside of the lock, because their end may
// end a graph.
class Lent {
 public:
  static Lent& all() { return PerProcess<Lent>::here(); }

  void add(const Impl& tensor, Handing handing, const LentFrom& from) {
    if (passes_ == 0) {  // no backward pass takes the tensor over
      return;
    }
    const MutexLock lock(mutex_);
    entries_.push_back({handing == Handing::kCopied ? Impl() : tensor, WeakTensor(tensor), tensor->unsafe_storage(),
                        from.saved, current_node(), std::this_thread::get_id(), from.save, from.is_view});
    count_ = entries_.size();
  }

  // Called before the calling thread's node is lent anything.
  void sweep_behind() noexcept {
    if (count_ == 0) {
      return;
    }
    const torch::autograd::Node* const running = current_node();
    const bool many = count_ > kMany;
    take(
        [running, many](const Entry& entry) {
          return entry.is_unused() && (entry.is_behind(running) || (many && entry.is_of_this_thread()));
        },
        Memory::kStays);
  }

  // Called when `save` ends.
  Memories sweep_here(const void* save) noexcept {
    if (count_ == 0) {
      return {};
    }
    const torch::autograd::Node* const running =
        current_node();  // the save's node, where that node has run and lets go
    return take(
        [running, save](const Entry& entry) {
          return entry.is_unused() && (entry.is_behind(running) || (entry.save == save && entry.is_of_this_thread()));
        },
        Memory::kIsReleased);
  }

  [[nodiscard]] bool anything() const { return count_ != 0; }

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

  enum class Memory : bool { kStays, kIsReleased };

  // Lets go of some of the entries that are done, and then of some that may be taken over. Each call looks at a bounded
  // number of entries, and the next call goes on from there, so that every entry is reached however many live. Returns
  // the memory that was released: of the calling thread's tensors that may be taken over and share their version
  // counter with nothing. (Another thread may be changing its tensors.)
  template <typename Done>
  Memories take(const Done& is_done, Memory of_the_others) noexcept {
    let_go_of_done(is_done);  // these end first: they share version counters with the others
    return let_go_of_nobodys(of_the_others);
  }

  template <typename Done>
  void let_go_of_done(const Done& is_done) noexcept {
    c10::SmallVector<Entry, kAtOnce> done;  // destroyed after the lock is released
    const MutexLock lock(mutex_);
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

  Memories let_go_of_nobodys(Memory memory) noexcept {
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
        entry.saved = WeakTensor(Impl());  // the saved tensor has ended already: this ends no graph
      }
      if (memory == Memory::kIsReleased && !entry.is_view && entry.memory && entry.is_of_this_thread()) {
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

namespace {

class LentTensorImpl final : public c10::TensorImpl {
 public:
  LentTensorImpl(const c10::TensorImpl& like, Handing handing, const LentFrom& from)
      : TensorImpl(like.key_set(), like.dtype(), like.device()),
        handing_(handing),
        saved_(from.saved),
        save_(from.save),
        is_view_(from.is_view) {
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
    Lent::all().add(copy, handing_, {save_, saved_, is_view_});
    return copy;
  }

  const Handing handing_;
  const WeakTensor saved_;
  const void* const save_;
  const bool is_view_;
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

at::Tensor lend(const at::Tensor& tensor, c10::Storage storage, Handing handing, const LentFrom& from) {
  auto lent = c10::make_intrusive<LentTensorImpl>(*tensor.unsafeGetTensorImpl(), handing, from);
  lent->set_storage_keep_dtype(std::move(storage));
  return at::Tensor(Impl(std::move(lent)));
}

at::Tensor lend(const at::Tensor& tensor, Handing handing, const LentFrom& from) {
  const c10::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
  const bool dense = typeid(impl) == typeid(c10::TensorImpl) && tensor.has_storage();
  // A tensor that dispatches to Python is its Python object, which a lent tensor would not have.
  const bool is_pythons = impl.key_set().has(c10::DispatchKey::Python);
  return dense && !is_pythons ? at::Tensor(Impl(c10::make_intrusive<LentTensorImpl>(impl, handing, from))) : tensor;
}

void refer_to_lent(const at::Tensor& tensor, const LentFrom& from) {
  Lent::all().add(tensor.getIntrusivePtr(), Handing::kItself, from);
}

void sweep_lent_behind() noexcept { Lent::all().sweep_behind(); }

Memories sweep_lent_here(const void* save) noexcept { return Lent::all().sweep_here(save); }

bool anything_is_lent() noexcept { return Lent::all().anything(); }

void free_unused_lent() noexcept { Lent::all().free_unused(); }

LendingPass::LendingPass() : lent_(Lent::all()) { lent_.begin_pass(); }

LendingPass::~LendingPass() {
  if (&lent_ == &Lent::all()) {  // else the process was forked in between, and there is nothing to end
    lent_.end_pass();
  }
}

}  // namespace ebb

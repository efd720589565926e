#include "offload/lent_tensor.h"

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <typeinfo>
#include <utility>
#include <vector>

#include <ATen/SequenceNumber.h>
#include <ATen/record_function.h>
#include <c10/core/TensorImpl.h>
#include <torch/csrc/autograd/function.h>

#include "streams/process_mark.h"

namespace ebb {
namespace {

using Impl = c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;

struct Entry {
  Impl tensor;          // null for an operation's own output
  WeakTensor handed;    // the same tensor
  c10::Storage memory;  // its
  WeakTensor saved;

  // Nobody else has it; or nobody has what was saved, nor saves of it.
  [[nodiscard]] bool is_done_with() const {
    return handed.use_count() == (tensor ? 1 : 0) || (saved.expired() && saved.weak_use_count() == 1);
  }
};

// The tensors that are referred to, of the whole process: a tensor may be lent on one thread and let go of on another.
//
// Threads: every member may be called from any thread. Tensors are destroyed outside of the lock, for that may end a
// graph.
class Lent {
 public:
  static Lent& all() {
    static auto* const lent = new Lent;  // autograd may run at any time, also at exit
    return *lent;
  }

  void add(const Impl& tensor, Handing handing, const WeakTensor& saved) {
    if (passes_ == 0 || process_.forked()) {  // nobody takes it over; and in a child the lock may never be released
      return;
    }
    std::vector<Entry> done;  // destroyed after the lock is released
    const std::lock_guard lock(mutex_);
    sweep_locked(done);
    tensors_.push_back(
        {handing == Handing::kCopied ? Impl() : tensor, WeakTensor(tensor), tensor->unsafe_storage(), saved});
    count_ = tensors_.size();
  }

  void sweep() noexcept {
    if (count_ == 0 || process_.forked()) {
      return;
    }
    std::vector<Entry> done;  // destroyed after the lock is released
    const std::lock_guard lock(mutex_);
    sweep_locked(done);
  }

  void begin_pass() { ++passes_; }

  void end_pass() noexcept {
    std::vector<Entry> done;  // destroyed after the lock is released
    if (--passes_ != 0 || count_ == 0 || process_.forked()) {
      return;
    }
    const std::lock_guard lock(mutex_);
    done.swap(tensors_);
    count_ = 0;
  }

 private:
  // LOCK: mutex_. The latest ones, which a node that has just run was lent; and one other, so that all have their turn.
  void sweep_locked(std::vector<Entry>& done) {
    constexpr std::size_t kLatest = 4;
    for (std::size_t index = tensors_.size(), last = index - std::min(index, kLatest); index-- > last;) {
      take_if_done(index, done);
    }
    if (!tensors_.empty()) {
      next_ = next_ < tensors_.size() ? next_ : 0;
      take_if_done(next_++, done);
    }
    count_ = tensors_.size();
  }

  // LOCK: mutex_
  void take_if_done(std::size_t index, std::vector<Entry>& done) {
    if (tensors_[index].is_done_with()) {
      done.push_back(std::move(tensors_[index]));
      if (index + 1 != tensors_.size()) {
        tensors_[index] = std::move(tensors_.back());
      }
      tensors_.pop_back();
    }
  }

  const ProcessMark process_;
  std::atomic<std::size_t> count_{0};
  std::atomic<std::int64_t> passes_{0};
  std::mutex mutex_;
  std::vector<Entry> tensors_;  // LOCK: mutex_
  std::size_t next_ = 0;        // LOCK: mutex_
};

class LentTensorImpl final : public c10::TensorImpl {
 public:
  LentTensorImpl(const c10::TensorImpl& like, c10::Storage storage, Handing handing, WeakTensor saved)
      : TensorImpl(c10::Storage(storage), like.key_set(), like.dtype()), handing_(handing), saved_(std::move(saved)) {
    copy_tensor_metadata(&like, this, like.version_counter(), /*allow_tensor_metadata_change=*/true);
    set_storage_keep_dtype(std::move(storage));
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
    Lent::all().add(copy, handing_, saved_);
    return copy;
  }

  const Handing handing_;
  const WeakTensor saved_;
};

}  // namespace

// The node that saves its own output is the newest of its thread.
Handing handing_of(const at::Tensor& saved) {
  if (saved.is_leaf()) {
    return saved.requires_grad() ? Handing::kLent : Handing::kItself;
  }
  const auto& made_by = saved.grad_fn();
  const bool output = made_by != nullptr && made_by->sequence_nr() + 1 >= at::sequence_number::peek() &&
                      made_by->thread_id() == at::RecordFunction::currentThreadId();
  return output ? Handing::kCopied : Handing::kLent;
}

at::Tensor lend(const at::Tensor& tensor, c10::Storage storage, Handing handing, const WeakTensor& saved) {
  return at::Tensor(
      Impl(c10::make_intrusive<LentTensorImpl>(*tensor.unsafeGetTensorImpl(), std::move(storage), handing, saved)));
}

at::Tensor lend(const at::Tensor& tensor, Handing handing, const WeakTensor& saved) {
  const c10::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
  return typeid(impl) == typeid(c10::TensorImpl) && tensor.has_storage()
             ? lend(tensor, tensor.storage(), handing, saved)
             : tensor;
}

void refer_to_lent(const at::Tensor& tensor, const WeakTensor& saved) {
  Lent::all().add(tensor.getIntrusivePtr(), Handing::kItself, saved);
}

void sweep_lent() noexcept { Lent::all().sweep(); }

LendingPass::LendingPass() { Lent::all().begin_pass(); }

LendingPass::~LendingPass() { Lent::all().end_pass(); }

}  // namespace ebb

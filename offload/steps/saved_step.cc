#include "offload/steps/saved_step.h"

#include <algorithm>
#include <new>
#include <utility>

#include <c10/util/ScopeExit.h>
#include <c10/util/hash.h>

#include "offload/recording/step_recorder.h"
#include "offload/steps/access_history.h"

namespace ebb {

SavedStep::~SavedStep() {
  if (!in_use_) {
    return;
  }
  --*thread_;
  history_->remember_sizes(sizes_.saved_bytes, sizes_.largest_bytes);
  try {
    history_->remember(signature_locked(), expected_.observed());
  } catch (const std::bad_alloc&) {  // the next step then expects another order, and works all the same
  }
}

bool SavedStep::begin() {
  const MutexLock lock(mutex_);
  return !std::exchange(has_begun_, true);
}

std::uint64_t SavedStep::next_candidate() {
  const MutexLock lock(mutex_);
  return candidates_++;
}

std::weak_ptr<const void> SavedStep::pass() {
  const MutexLock lock(mutex_);
  if (pass_ == nullptr) {
    pass_ = std::make_shared<int>();
  }
  return pass_;
}

std::uint64_t SavedStep::next_search() {
  const MutexLock lock(mutex_);
  return searches_++;
}

void SavedStep::began() {
  const MutexLock lock(mutex_);
  ++alive_;
}

void SavedStep::ended(std::optional<Gone> gone) {
  std::shared_ptr<StepRecorder> recorder;  // destroyed after the lock is released
  const MutexLock lock(mutex_);
  --alive_;
  if (alive_ == 0 && !in_use_) {
    has_begun_ = false;
    candidates_ = 0;
    searches_ = 0;
    pass_.reset();
    sizes_ = {};
    entries_.clear();
    signature_.reset();
    gone_ = 0;
    last_save_ = {};
    recorder = std::exchange(recorder_, nullptr);
    plan_ = nullptr;
    expected_.forget();
    follows_plan_ = false;
    tried_early_ = false;
    history_->drop_step();
    return;
  }
  if (!gone) {
    return;
  }
  const std::optional<std::uint32_t> index = index_locked(gone->id);
  if (!index) {
    sizes_.saved_in_backward_bytes -= gone->bytes;
    return;
  }
  Entry& entry = entries_[*index];
  entry.storage.reset();
  if (in_use_) {
    return;
  }
  entry.gone = true;
  signature_.reset();
  ++gone_;
  sizes_.saved_bytes -= entry.bytes;
  constexpr std::size_t kMany = 64;
  if (gone_ >= kMany && 2 * gone_ > entries_.size()) {
    forget_gone_locked();
  }
}

// Erases the entries of storages that have ended. The indices of all later entries change, so the expected order is
// recalled anew before its next use.
void SavedStep::forget_gone_locked() {
  if (gone_ == 0) {
    return;
  }
  std::erase_if(entries_, &Entry::gone);
  gone_ = 0;
  expected_.forget();
}

// The index of the entry with this id; nullopt for a storage that backward itself saved, which has no entry.
std::optional<std::uint32_t> SavedStep::index_locked(Id id) const {
  const auto found = std::ranges::lower_bound(entries_, id, {}, &Entry::id);
  return found == entries_.end() || found->id != id
             ? std::nullopt
             : std::optional(static_cast<std::uint32_t>(found - entries_.begin()));
}

std::uint64_t SavedStep::signature_locked() const {
  if (signature_) {
    return *signature_;
  }
  std::uint64_t signature = 0;
  for (const Entry& entry : entries_) {
    if (!entry.gone) {
      signature = c10::hash_combine(signature, entry.bytes);
    }
  }
  signature_ = signature;
  return signature;
}

void SavedStep::record_by(std::shared_ptr<StepRecorder> recorder) {
  std::shared_ptr<StepRecorder> before;  // destroyed after the lock is released
  const MutexLock lock(mutex_);
  if (recorder_ != nullptr && recorder_ != recorder) {  // the earlier recorder has seen only a part of the step
    recorder_->disturb();
  }
  before = std::exchange(recorder_, std::move(recorder));
}

void SavedStep::follow(std::shared_ptr<const Plan> plan) {
  const MutexLock lock(mutex_);
  plan_ = std::move(plan);
}

std::shared_ptr<StepRecorder> SavedStep::recorder() {
  const MutexLock lock(mutex_);
  return recorder_;
}

std::shared_ptr<const Plan> SavedStep::plan() {
  const MutexLock lock(mutex_);
  return plan_;
}

SavedStep::Id SavedStep::append(std::weak_ptr<SavedStorage> storage, std::uint64_t bytes, c10::Stream stream,
                                std::uint32_t ordinal, Went when) {
  const MutexLock lock(mutex_);
  const Id id = next_id_++;
  last_stream_ = stream;
  sizes_.largest_bytes = std::max(sizes_.largest_bytes, bytes);
  if (in_use_) {
    sizes_.saved_in_backward_bytes += bytes;
    sizes_.saved_bytes = std::max(sizes_.saved_bytes, sizes_.saved_in_backward_bytes);
  } else {
    sizes_.saved_bytes += bytes;
    signature_.reset();
    entries_.push_back({id, std::move(storage), bytes, when == Went::kAtItsSave ? ordinal : kNotPlanned});
  }
  if (when == Went::kAtItsSave) {
    last_save_ = {bytes, std::max(last_save_.bytes, last_save_.largest_before)};
  }
  history_->raise_sizes(sizes_.saved_bytes, sizes_.largest_bytes);
  return id;
}

SavedStep::LastSave SavedStep::last_save() {
  const MutexLock lock(mutex_);
  return last_save_;
}

void SavedStep::begin_use() {
  if (in_use_) {
    return;
  }
  const MutexLock lock(mutex_);
  if (in_use_) {
    return;
  }
  forget_gone_locked();
  expect_uses_locked();
  ++*thread_;
  in_use_ = true;
}

bool SavedStep::asked(std::uint32_t ordinal) {
  begin_use();
  if (!follows_plan_) {
    return false;
  }
  const MutexLock lock(mutex_);
  expected_.asked(ordinal);
  return true;
}

void SavedStep::used(Id id) {
  begin_use();
  const MutexLock lock(mutex_);
  if (const std::optional<std::uint32_t> index = index_locked(id)) {  // else backward itself saved the storage
    expected_.used(*index);
  }
}

void SavedStep::expect_uses_locked() {
  follows_plan_ = plan_ != nullptr;
  if (plan_ == nullptr) {
    expected_.expect(history_->recall(signature_locked(), entries_.size()));
    return;
  }
  std::vector<std::uint32_t> ordinals;
  ordinals.reserve(entries_.size());
  for (const Entry& entry : entries_) {
    ordinals.push_back(entry.ordinal);
  }
  expected_.expect(*plan_, ordinals);
}

bool SavedStep::order_is_known() {
  const MutexLock lock(mutex_);
  return plan_ != nullptr || history_->knows(signature_locked());
}

void SavedStep::prefetch_early(c10::Stream stream, Start start) {
  tried_early_ = true;
  {
    const MutexLock lock(mutex_);
    if (in_use_ || last_stream_ != stream || (plan_ == nullptr && !history_->knows(signature_locked()))) {
      return;
    }
    forget_gone_locked();
    expect_uses_locked();
  }
  static_cast<void>(prefetch(start));
}

bool SavedStep::prefetch(Start start) {
  std::vector<std::shared_ptr<SavedStorage>> asked;  // if the graph is dropped meanwhile, the storages end last
  if (is_prefetching_.exchange(true)) {
    return false;
  }
  const auto over = c10::make_scope_exit([this] { is_prefetching_ = false; });
  while (true) {
    std::optional<ExpectedUses::Next> next;
    {
      const MutexLock lock(mutex_);
      std::shared_ptr<SavedStorage> storage;
      next = expected_.next(0);
      while (next && (storage = entries_[next->index].storage.lock()) == nullptr) {
        next = expected_.next(next->rank + 1);
      }
      if (!next) {
        expected_.all_are_prefetched();
        return true;
      }
      if (!expected_.starts(*next)) {
        return false;
      }
      asked.push_back(std::move(storage));
    }
    if (!start(*asked.back(), next->held_bytes)) {
      return false;
    }
    const MutexLock lock(mutex_);
    expected_.prefetched(*next);
  }
}

void SavedStep::prefetch_is_cancelled(bool device_is_full) {
  const MutexLock lock(mutex_);
  expected_.is_cancelled(device_is_full);
}

}  // namespace ebb

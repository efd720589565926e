#include "offload/steps/saved_step.h"

#include <algorithm>
#include <mutex>
#include <new>
#include <utility>

#include <c10/util/hash.h>

#include "offload/recording/step_recorder.h"
#include "offload/residency/tiered_storage.h"
#include "offload/steps/access_history.h"
#include "offload/steps/thread_steps.h"

namespace ebb {

SavedStep::~SavedStep() {
  if (!in_use_) {
    return;
  }
  steps_->leave_backward();
  history_->remember_sizes(saved_bytes_, largest_bytes_);
  try {
    history_->remember(signature_locked(), std::move(observed_));
  } catch (const std::bad_alloc&) {  // the next step then expects another order, and works all the same
  }
}

std::uint64_t SavedStep::next_candidate() {
  const MutexLock lock(mutex_);
  return candidates_++;
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
    candidates_ = 0;
    saved_bytes_ = 0;
    largest_bytes_ = 0;
    entries_.clear();
    signature_.reset();
    gone_ = 0;
    last_save_ = {};
    recorder = std::exchange(recorder_, nullptr);
    plan_ = nullptr;
    part_of_.clear();
    last_part_.clear();
    held_bytes_.reset();
    order_.clear();
    rank_.clear();
    unclaimed_.clear();
    prefetched_to_ = 0;
    ++resets_;
    tried_early_ = false;
    device_is_full_ = false;
    history_->drop_step();
    return;
  }
  if (!gone) {
    return;
  }
  const std::optional<std::uint32_t> index = index_locked(gone->id);
  if (!index) {
    saved_in_backward_bytes_ -= gone->bytes;
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
  saved_bytes_ -= entry.bytes;
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
  order_.clear();
  rank_.clear();
  prefetched_to_ = 0;
  ++resets_;
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

SavedStep::Id SavedStep::append(std::weak_ptr<TieredStorage> storage, std::uint64_t bytes, c10::Stream stream,
                                std::uint32_t ordinal, Went when) {
  const MutexLock lock(mutex_);
  const Id id = next_id_++;
  last_stream_ = stream;
  largest_bytes_ = std::max(largest_bytes_, bytes);
  if (in_use_) {
    saved_in_backward_bytes_ += bytes;
    saved_bytes_ = std::max(saved_bytes_, saved_in_backward_bytes_);
  } else {
    saved_bytes_ += bytes;
    signature_.reset();
    entries_.push_back({id, std::move(storage), bytes, when == Went::kAtItsSave ? ordinal : kNotPlanned});
  }
  if (when == Went::kAtItsSave) {
    last_save_ = {bytes, std::max(last_save_.bytes, last_save_.largest_before)};
  }
  history_->raise_sizes(saved_bytes_, largest_bytes_);
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
  recall_order_locked();
  steps_->enter_backward();
  in_use_ = true;
}

bool SavedStep::asked(std::uint32_t ordinal) {
  begin_use();
  if (part_of_.empty()) {  // no lock: part_of_ no longer changes once backward has begun
    return false;
  }
  if (ordinal < part_of_.size()) {
    const MutexLock lock(mutex_);
    part_ = std::max(part_, part_of_[ordinal]);  // backward may ask for a candidate again
  }
  return true;
}

void SavedStep::used(Id id) {
  begin_use();
  const MutexLock lock(mutex_);
  const std::optional<std::uint32_t> index = index_locked(id);
  if (!index) {  // the backward pass itself saved the storage, so no order is known
    return;
  }
  if (entries_[*index].used_in == pass_) {  // backward runs over this graph again
    ++pass_;
    prefetched_to_ = 0;
    ++resets_;
    device_is_full_ = false;
    part_ = 0;
  }
  entries_[*index].used_in = pass_;
  if (rank_[*index] != cursor_) {  // an unexpected use: storages that were passed over are looked at again
    prefetched_to_ = 0;
    ++resets_;
  }
  cursor_ = rank_[*index] + 1;
  if (pass_ == kFirstPass) {
    observed_.push_back(*index);
  }
}

void SavedStep::recall_order_locked() {
  const std::size_t count = entries_.size();
  part_of_.clear();
  last_part_.clear();
  held_bytes_.reset();
  part_ = 0;
  order_ = plan_ == nullptr ? history_->recall(signature_locked(), count) : planned_order_locked();
  rank_.resize(count);
  for (std::uint32_t rank = 0; rank < count; ++rank) {
    rank_[order_[rank]] = rank;
  }
  prefetched_to_ = 0;
  ++resets_;
}

// The plan's order of copies in; storages that the plan does not list come last, in the reverse of saving.
std::vector<std::uint32_t> SavedStep::planned_order_locked() {
  const PrefetchSchedule& room = plan_->schedule.backward;
  const std::size_t planned = plan_->decisions.size();
  std::vector<std::uint32_t> index_of(planned, kNotPlanned);
  for (std::uint32_t index = 0; index < entries_.size(); ++index) {
    if (entries_[index].ordinal < planned) {
      index_of[entries_[index].ordinal] = index;
    }
  }
  part_of_.assign(planned, 0);
  for (std::uint32_t k = 0; k < room.needed.size(); ++k) {
    part_of_[room.needed[k]] = k + 1;
  }
  held_bytes_.emplace(room.held_bytes);
  std::vector<bool> listed(entries_.size(), false);
  std::vector<std::uint32_t> order;
  for (const PrefetchSchedule::CopyIn& copy : room.copies_in) {
    if (const std::uint32_t index = index_of[copy.storage]; index != kNotPlanned) {
      listed[index] = true;
      order.push_back(index);
      last_part_.push_back(copy.last_part);
    }
  }
  for (std::size_t index = listed.size(); index-- > 0;) {
    if (!listed[index]) {
      order.push_back(static_cast<std::uint32_t>(index));
      last_part_.push_back(kNotPlanned);
    }
  }
  return order;
}

// How many bytes ebb may hold on the device if the storage of this rank is fetched now; nullopt without a plan.
std::optional<std::uint64_t> SavedStep::held_bytes_locked(std::size_t rank) const {
  if (!held_bytes_) {
    return std::nullopt;
  }
  const std::uint32_t last_part = last_part_[rank];
  return last_part == kNotPlanned ? 0 : (*held_bytes_)(std::min(part_, last_part), last_part);
}

bool SavedStep::order_is_known() {
  const MutexLock lock(mutex_);
  return plan_ != nullptr || history_->knows(signature_locked());
}

void SavedStep::prefetch_early(c10::Stream stream) {
  tried_early_ = true;
  {
    const MutexLock lock(mutex_);
    if (in_use_ || last_stream_ != stream || (plan_ == nullptr && !history_->knows(signature_locked()))) {
      return;
    }
    forget_gone_locked();
    recall_order_locked();
  }
  static_cast<void>(prefetch());
}

bool SavedStep::prefetch() {
  std::vector<std::shared_ptr<TieredStorage>>
      asked;  // if the graph is dropped meanwhile, the storages end after the lock is released
  if (!fetch_mutex_.try_lock()) {
    return false;
  }
  const MutexLock one_at_a_time(fetch_mutex_, std::adopt_lock);
  while (true) {
    std::shared_ptr<TieredStorage> next;
    Id id = 0;
    std::size_t rank = 0;
    std::uint64_t resets = 0;
    std::optional<std::uint64_t> held_bytes;
    {
      const MutexLock lock(mutex_);
      const std::size_t from = device_is_full_ ? cursor_ : std::max(cursor_, prefetched_to_);
      for (rank = from; rank < order_.size() && next == nullptr; ++rank) {
        if (entries_[order_[rank]].used_in != pass_) {
          next = entries_[order_[rank]].storage.lock();
        }
      }
      if (device_is_full_ && next != nullptr && rank <= prefetched_to_) {
        return false;
      }
      prefetched_to_ = next == nullptr ? rank : rank - 1;
      resets = resets_;
      if (next != nullptr) {
        held_bytes = held_bytes_locked(rank - 1);
        Entry& entry = entries_[order_[rank - 1]];
        id = entry.id;
        prefetches_locked(entry);
      }
    }
    if (next == nullptr) {
      return true;
    }
    asked.push_back(next);
    prefetches_now();
    if (!next->prefetch(held_bytes)) {
      return false;
    }
    const MutexLock lock(mutex_);
    if (const std::optional<std::uint32_t> index = index_locked(id)) {
      prefetches_locked(entries_[*index]);
    }
    prefetches_now();         // a make_room() meanwhile may have passed over this copy and reset the mark
    if (resets_ == resets) {  // otherwise prefetches of lower ranks may have been cancelled meanwhile
      prefetched_to_ = std::max(prefetched_to_, rank);
    }
  }
}

// Registers this step with its thread as one that may hold unclaimed copies. Called before the copy is started, so that
// a make_room() on another thread finds the copy.
void SavedStep::prefetches_now() {
  if (!prefetching_.exchange(true)) {
    steps_->prefetches(weak_from_this());
  }
}

void SavedStep::make_room(const std::function<bool()>& enough) {
  {
    const MutexLock lock(mutex_);
    device_is_full_ = true;
  }
  cancel_prefetches(enough);
}

// Lists the entry among the unclaimed copies. Called before the copy is started, as prefetches_now() is.
void SavedStep::prefetches_locked(Entry& entry) {
  if (!std::exchange(entry.prefetched, true)) {
    unclaimed_.push_back(entry.id);
  }
}

// Empties the list of unclaimed copies and returns it, the copy that is needed last first. Only entries that were
// prefetched are visited, because a step may be long and its backward may run in many parts.
std::vector<SavedStep::Id> SavedStep::take_unclaimed_locked() {
  std::vector<Id> taken = std::exchange(unclaimed_, {});
  std::erase_if(taken, [this](Id id) EBB_REQUIRES(mutex_) { return !index_locked(id); });
  for (const Id id : taken) {
    entries_[*index_locked(id)].prefetched = false;
  }
  if (order_.size() == entries_.size()) {
    std::ranges::sort(taken, std::greater<>(), [this](Id id) EBB_REQUIRES(mutex_) { return rank_[*index_locked(id)]; });
  } else {  // entries were added or erased since: the first saved is taken to be needed last
    std::ranges::sort(taken);
  }
  return taken;
}

void SavedStep::cancel_prefetches(const std::function<bool()>& enough) {
  prefetching_ = false;
  std::vector<Id> unclaimed;
  {
    const MutexLock lock(mutex_);
    unclaimed = take_unclaimed_locked();
    prefetched_to_ = 0;
    ++resets_;
  }
  for (auto each = unclaimed.begin(); each != unclaimed.end(); ++each) {
    if (enough()) {
      const MutexLock lock(mutex_);
      std::for_each(each, unclaimed.end(), [this](Id id) EBB_REQUIRES(mutex_) {
        if (const std::optional<std::uint32_t> index = index_locked(id)) {
          prefetches_locked(entries_[*index]);
        }
      });
      prefetches_now();
      return;
    }
    std::shared_ptr<TieredStorage> storage;
    {
      const MutexLock lock(mutex_);
      const std::optional<std::uint32_t> index = index_locked(*each);
      storage = index ? entries_[*index].storage.lock() : nullptr;
    }
    if (storage != nullptr) {
      storage->cancel_prefetch();
    }
  }
}

}  // namespace ebb

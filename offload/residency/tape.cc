#include "offload/residency/tape.h"

#include <algorithm>
#include <optional>

#include "offload/planning/step_recorder.h"
#include "offload/residency/order_book.h"
#include "offload/residency/thread_steps.h"

namespace ebb {

Tape::~Tape() {
  if (in_use_) {
    steps_->leave_backward();
    book_->remember(signature_locked(), std::move(observed_));
    book_->remember_sizes(saved_bytes_, largest_bytes_);
  }
}

std::uint64_t Tape::next_candidate() {
  const std::lock_guard lock(mutex_);
  ++alive_;
  return candidates_++;
}

void Tape::began() {
  const std::lock_guard lock(mutex_);
  ++alive_;
}

void Tape::ended(std::optional<Gone> gone) {
  const std::lock_guard lock(mutex_);
  --alive_;
  if (alive_ == 0 && !in_use_) {
    candidates_ = 0;
    saved_bytes_ = 0;
    largest_bytes_ = 0;
    entries_.clear();
    signature_.reset();
    gone_ = 0;
    last_save_ = {};
    recorder_ = nullptr;
    plan_ = nullptr;
    part_of_.clear();
    last_part_.clear();
    held_bytes_.reset();
    order_.clear();
    rank_.clear();
    guesses_.clear();
    fetched_to_ = 0;
    ++resets_;
    tried_early_ = false;
    device_is_full_ = false;
    book_->drop_step();
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

// Their indices change: what is expected is recalled anew.
void Tape::forget_gone_locked() {
  if (gone_ == 0) {
    return;
  }
  std::erase_if(entries_, &Entry::gone);
  gone_ = 0;
  order_.clear();
  rank_.clear();
  fetched_to_ = 0;
  ++resets_;
}

// Of those that went away before backward began.
std::optional<std::uint32_t> Tape::index_locked(Id id) const {
  const auto found = std::ranges::lower_bound(entries_, id, {}, &Entry::id);
  return found == entries_.end() || found->id != id
             ? std::nullopt
             : std::optional(static_cast<std::uint32_t>(found - entries_.begin()));
}

std::uint64_t Tape::signature_locked() const {
  if (signature_) {
    return *signature_;
  }
  constexpr std::uint64_t kFnvPrime = 0x100000001b3;  // Fowler-Noll-Vo 1a, 64 bits
  std::uint64_t signature = 0;
  for (const Entry& entry : entries_) {
    if (!entry.gone) {
      signature = (signature ^ entry.bytes) * kFnvPrime;
    }
  }
  signature_ = signature;
  return signature;
}

void Tape::record_by(std::shared_ptr<StepRecorder> recorder) {
  const std::lock_guard lock(mutex_);
  if (recorder_ != nullptr && recorder_ != recorder) {  // it has seen a part of the step only
    recorder_->disturb();
  }
  recorder_ = std::move(recorder);
}

void Tape::follow(std::shared_ptr<const Plan> plan) {
  const std::lock_guard lock(mutex_);
  plan_ = std::move(plan);
}

std::shared_ptr<StepRecorder> Tape::recorder() {
  const std::lock_guard lock(mutex_);
  return recorder_;
}

std::shared_ptr<const Plan> Tape::plan() {
  const std::lock_guard lock(mutex_);
  return plan_;
}

Tape::Id Tape::append(std::weak_ptr<Prefetchable> storage, std::uint64_t bytes, c10::Stream stream,
                      std::uint32_t ordinal, Went when) {
  const std::lock_guard lock(mutex_);
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
  book_->raise_sizes(saved_bytes_, largest_bytes_);
  return id;
}

Tape::LastSave Tape::last_save() {
  const std::lock_guard lock(mutex_);
  return last_save_;
}

void Tape::begin_use() {
  if (in_use_) {
    return;
  }
  const std::lock_guard lock(mutex_);
  begin_use_locked();
}

bool Tape::asked(std::uint32_t ordinal) {
  begin_use();
  if (part_of_.empty()) {  // no lock: it stays as it is once backward has begun
    return false;
  }
  if (ordinal < part_of_.size()) {
    const std::lock_guard lock(mutex_);
    part_ = std::max(part_, part_of_[ordinal]);  // it may have asked for it before
  }
  return true;
}

void Tape::used(Id id) {
  begin_use();
  const std::lock_guard lock(mutex_);
  const std::optional<std::uint32_t> index = index_locked(id);
  if (!index) {  // saved by the backward pass itself, in no order that is known
    return;
  }
  if (entries_[*index].used_in == pass_) {  // backward runs over this graph again
    ++pass_;
    fetched_to_ = 0;
    ++resets_;
    device_is_full_ = false;
    part_ = 0;
  }
  entries_[*index].used_in = pass_;
  if (rank_[*index] != cursor_) {  // not what was expected: look again at what has been passed over
    fetched_to_ = 0;
    ++resets_;
  }
  cursor_ = rank_[*index] + 1;
  if (pass_ == kFirstPass) {
    observed_.push_back(*index);
  }
}

void Tape::begin_use_locked() {
  if (in_use_) {
    return;
  }
  forget_gone_locked();
  recall_order_locked();
  steps_->enter_backward();
  in_use_ = true;
}

}  // namespace ebb

#include "offload/tape.h"

#include <algorithm>
#include <optional>

#include "offload/log.h"
#include "offload/order_book.h"
#include "offload/saved_storage.h"
#include "offload/step_recorder.h"

namespace ebb {

Tape::~Tape() {
  if (in_use_) {
    book_->remember(signature_, std::move(observed_));
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

void Tape::ended() {
  const std::lock_guard lock(mutex_);
  --alive_;
  if (alive_ == 0 && !in_use_) {
    candidates_ = 0;
    saved_bytes_ = 0;
    largest_bytes_ = 0;
    storages_.clear();
    ordinals_.clear();
    kept_.clear();
    last_save_ = {};
    recorder_ = nullptr;
    plan_ = nullptr;
    part_of_.clear();
    last_part_.clear();
    held_bytes_.reset();
    used_.clear();
    signature_ = 0;
    order_.clear();
    rank_.clear();
    fetched_to_ = 0;
    tried_early_ = false;
    book_->drop_step();
  }
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

std::size_t Tape::append(std::weak_ptr<SavedStorage> storage, std::uint64_t bytes, c10::Stream stream,
                         std::uint32_t ordinal, Went when) {
  const std::lock_guard lock(mutex_);
  ordinals_.push_back(when == Went::kAtItsSave ? ordinal : kNotPlanned);
  last_stream_ = stream;
  storages_.push_back(std::move(storage));
  used_.push_back(false);
  saved_bytes_ += bytes;
  largest_bytes_ = std::max(largest_bytes_, bytes);
  if (when == Went::kAtItsSave) {
    last_save_ = {bytes, std::max(last_save_.bytes, last_save_.largest_before)};
  }
  book_->raise_sizes(saved_bytes_, largest_bytes_);
  if (!in_use_) {
    constexpr std::uint64_t kFnvPrime = 0x100000001b3;  // Fowler-Noll-Vo 1a, 64 bits
    signature_ = (signature_ ^ bytes) * kFnvPrime;
  }
  return storages_.size() - 1;
}

Tape::LastSave Tape::last_save() {
  const std::lock_guard lock(mutex_);
  return last_save_;
}

void Tape::kept(std::weak_ptr<SavedStorage> storage, c10::Stream stream) {
  const std::lock_guard lock(mutex_);
  kept_.push_back({std::move(storage), stream});
}

void Tape::evict(const std::function<bool()>& enough) {
  for (std::size_t next = 0; !enough();) {
    std::shared_ptr<SavedStorage> storage;
    std::optional<c10::Stream> stream;
    {
      const std::lock_guard lock(mutex_);
      for (; next < kept_.size() && storage == nullptr; ++next) {
        storage = kept_[next].storage.lock();
        stream = kept_[next].stream;
      }
    }
    if (storage == nullptr) {
      return;
    }
    try {
      static_cast<void>(storage->evict(*stream));  // one that was evicted before refuses
    } catch (...) {
      log_warning("a tensor that was kept could not be moved to make room on the device");
    }
  }
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

void Tape::used(std::size_t position) {
  begin_use();
  const std::lock_guard lock(mutex_);
  if (used_[position]) {  // backward runs over this graph again
    used_.assign(used_.size(), false);
    first_pass_ = false;
    fetched_to_ = 0;
    part_ = 0;
  }
  used_[position] = true;
  if (position < rank_.size()) {       // else it was saved by the backward pass itself, in no order that is known
    if (rank_[position] != cursor_) {  // not what was expected: look again at what has been passed over
      fetched_to_ = 0;
    }
    cursor_ = rank_[position] + 1;
    if (first_pass_) {
      observed_.push_back(static_cast<std::uint32_t>(position));
    }
  }
}

void Tape::begin_use_locked() {
  if (in_use_) {
    return;
  }
  recall_order_locked();
  in_use_ = true;
}

}  // namespace ebb

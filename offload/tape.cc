#include "offload/tape.h"

#include <algorithm>
#include <numeric>
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

void Tape::recall_order_locked() {
  const std::size_t count = storages_.size();
  part_of_.clear();
  last_part_.clear();
  held_bytes_.reset();
  part_ = 0;
  order_ = plan_ == nullptr ? book_->recall(signature_, count) : planned_order_locked();
  rank_.resize(count);
  for (std::uint32_t rank = 0; rank < count; ++rank) {
    rank_[order_[rank]] = rank;
  }
  fetched_to_ = 0;
}

// As the plan has it; what is not in it, last.
std::vector<std::uint32_t> Tape::planned_order_locked() {
  const BackwardRoom& room = plan_->room.backward;
  const std::size_t planned = plan_->decisions.size();
  std::vector<std::uint32_t> position_of(planned, kNotPlanned);
  for (std::uint32_t position = 0; position < ordinals_.size(); ++position) {
    if (ordinals_[position] < planned) {
      position_of[ordinals_[position]] = position;
    }
  }
  part_of_.assign(planned, 0);
  for (std::uint32_t k = 0; k < room.needed.size(); ++k) {
    part_of_[room.needed[k]] = k + 1;
  }
  held_bytes_.emplace(room.held_bytes);
  std::vector<bool> listed(storages_.size(), false);
  std::vector<std::uint32_t> order;
  for (const BackwardRoom::CopyIn& copy : room.copies_in) {
    if (const std::uint32_t position = position_of[copy.storage]; position != kNotPlanned) {
      listed[position] = true;
      order.push_back(position);
      last_part_.push_back(copy.last_part);
    }
  }
  for (std::size_t position = listed.size(); position-- > 0;) {
    if (!listed[position]) {
      order.push_back(static_cast<std::uint32_t>(position));
      last_part_.push_back(kNotPlanned);
    }
  }
  return order;
}

// What ebb may hold on the device if the storage of this rank is fetched now; nullopt without a plan.
std::optional<std::uint64_t> Tape::held_bytes_locked(std::size_t rank) const {
  if (!held_bytes_) {
    return std::nullopt;
  }
  const std::uint32_t last_part = last_part_[rank];
  return last_part == kNotPlanned ? 0 : (*held_bytes_)(std::min(part_, last_part), last_part);
}

bool Tape::order_is_known() {
  const std::lock_guard lock(mutex_);
  return plan_ != nullptr || book_->knows(signature_);
}

void Tape::fetch_early(c10::Stream stream) {
  tried_early_ = true;
  {
    const std::lock_guard lock(mutex_);
    if (in_use_ || last_stream_ != stream || (plan_ == nullptr && !book_->knows(signature_))) {
      return;
    }
    recall_order_locked();
  }
  static_cast<void>(fetch_ahead());
}

bool Tape::fetch_ahead() {
  std::vector<std::shared_ptr<SavedStorage>> asked;  // if the graph is dropped meanwhile, they end after the lock
  const std::unique_lock one_at_a_time(fetch_mutex_, std::try_to_lock);
  if (!one_at_a_time) {
    return false;
  }
  while (true) {
    std::shared_ptr<SavedStorage> next;
    std::size_t rank = 0;
    std::optional<std::uint64_t> held_bytes;
    {
      const std::lock_guard lock(mutex_);
      for (rank = std::max(cursor_, fetched_to_); rank < order_.size() && next == nullptr; ++rank) {
        if (!used_[order_[rank]]) {
          next = storages_[order_[rank]].lock();
        }
      }
      fetched_to_ = next == nullptr ? rank : rank - 1;
      if (next != nullptr) {
        held_bytes = held_bytes_locked(rank - 1);
      }
    }
    if (next == nullptr) {
      return true;
    }
    asked.push_back(next);
    if (!next->fetch_ahead(held_bytes)) {
      return false;
    }
    const std::lock_guard lock(mutex_);
    fetched_to_ = std::max(fetched_to_, rank);
  }
}

void Tape::drop_guesses() {
  std::vector<std::weak_ptr<SavedStorage>> storages;
  {
    const std::lock_guard lock(mutex_);
    storages = storages_;
    fetched_to_ = 0;
  }
  for (const std::weak_ptr<SavedStorage>& each : storages) {
    if (const std::shared_ptr<SavedStorage> storage = each.lock()) {
      storage->drop_guess();
    }
  }
}

}  // namespace ebb

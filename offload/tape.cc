#include "offload/tape.h"

#include <algorithm>
#include <numeric>
#include <optional>

#include "offload/order_book.h"
#include "offload/saved_storage.h"

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

void Tape::ended() {
  const std::lock_guard lock(mutex_);
  --alive_;
  if (alive_ == 0 && !in_use_) {
    candidates_ = 0;
    saved_bytes_ = 0;
    largest_bytes_ = 0;
    storages_.clear();
    used_.clear();
    signature_ = 0;
    order_.clear();
    rank_.clear();
    fetched_to_ = 0;
    tried_early_ = false;
    book_->drop_step();
  }
}

std::size_t Tape::append(std::weak_ptr<SavedStorage> storage, std::uint64_t bytes, c10::Stream stream) {
  const std::lock_guard lock(mutex_);
  last_stream_ = stream;
  storages_.push_back(std::move(storage));
  used_.push_back(false);
  saved_bytes_ += bytes;
  largest_bytes_ = std::max(largest_bytes_, bytes);
  book_->raise_sizes(saved_bytes_, largest_bytes_);
  if (!in_use_) {
    constexpr std::uint64_t kFnvPrime = 0x100000001b3;  // Fowler-Noll-Vo 1a, 64 bits
    signature_ = (signature_ ^ bytes) * kFnvPrime;
  }
  return storages_.size() - 1;
}

void Tape::begin_use() {
  if (in_use_) {
    return;
  }
  const std::lock_guard lock(mutex_);
  begin_use_locked();
}

void Tape::used(std::size_t position) {
  begin_use();
  const std::lock_guard lock(mutex_);
  if (used_[position]) {  // backward runs over this graph again
    used_.assign(used_.size(), false);
    first_pass_ = false;
    fetched_to_ = 0;
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
  order_ = book_->recall(signature_, count);
  rank_.resize(count);
  for (std::uint32_t rank = 0; rank < count; ++rank) {
    rank_[order_[rank]] = rank;
  }
  fetched_to_ = 0;
}

bool Tape::order_is_known() {
  const std::lock_guard lock(mutex_);
  return book_->knows(signature_);
}

void Tape::fetch_early(c10::Stream stream) {
  tried_early_ = true;
  {
    const std::lock_guard lock(mutex_);
    if (in_use_ || last_stream_ != stream || !book_->knows(signature_)) {
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
    {
      const std::lock_guard lock(mutex_);
      for (rank = std::max(cursor_, fetched_to_); rank < order_.size() && next == nullptr; ++rank) {
        if (!used_[order_[rank]]) {
          next = storages_[order_[rank]].lock();
        }
      }
      fetched_to_ = next == nullptr ? rank : rank - 1;
    }
    if (next == nullptr) {
      return true;
    }
    asked.push_back(next);
    if (!next->fetch_ahead()) {
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

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
  }
  book_->remember_sizes(saved_bytes_, largest_bytes_);
}

std::uint64_t Tape::next_candidate(std::uint64_t bytes) {
  const std::lock_guard lock(mutex_);
  saved_bytes_ += bytes;
  largest_bytes_ = std::max(largest_bytes_, bytes);
  book_->raise_sizes(saved_bytes_, largest_bytes_);
  return candidates_++;
}

std::size_t Tape::append(std::weak_ptr<SavedStorage> storage, std::uint64_t bytes) {
  const std::lock_guard lock(mutex_);
  storages_.push_back(std::move(storage));
  used_.push_back(false);
  if (!in_use_) {
    constexpr std::uint64_t kFnvPrime = 0x100000001b3;  // Fowler-Noll-Vo 1a, 64 bits
    signature_ = (signature_ ^ bytes) * kFnvPrime;
  }
  return storages_.size() - 1;
}

void Tape::used(std::size_t position) {
  const std::lock_guard lock(mutex_);
  if (!in_use_) {
    begin_use();
  }
  if (used_[position]) {  // backward runs over this graph again
    used_.assign(used_.size(), false);
    first_pass_ = false;
  }
  used_[position] = true;
  if (position < rank_.size()) {  // else it was saved by the backward pass itself, in no order that is known
    cursor_ = rank_[position] + 1;
    if (first_pass_) {
      observed_.push_back(static_cast<std::uint32_t>(position));
    }
  }
}

void Tape::begin_use() {
  const std::size_t count = storages_.size();
  order_ = book_->recall(signature_, count);
  rank_.resize(count);
  for (std::uint32_t rank = 0; rank < count; ++rank) {
    rank_[order_[rank]] = rank;
  }
  in_use_ = true;
}

void Tape::fetch_ahead() {
  const std::unique_lock one_at_a_time(fetch_mutex_, std::try_to_lock);
  if (!one_at_a_time) {
    return;
  }
  std::size_t rank = 0;
  {
    const std::lock_guard lock(mutex_);
    rank = cursor_;
  }
  while (true) {
    std::shared_ptr<SavedStorage> next;
    {
      const std::lock_guard lock(mutex_);
      while (rank < order_.size() && next == nullptr) {
        const std::uint32_t position = order_[rank++];
        if (!used_[position]) {
          next = storages_[position].lock();
        }
      }
    }
    if (next == nullptr || !next->fetch_ahead()) {
      return;
    }
  }
}

}  // namespace ebb

#include "offload/tape.h"

#include <algorithm>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "offload/order_book.h"
#include "offload/saved_storage.h"

// In which order backward is expected to use what went away, and fetching that ahead; tape.cc has the rest.
namespace ebb {

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

#include "offload/residency/tape.h"

#include <algorithm>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "offload/residency/order_book.h"
#include "offload/residency/prefetchable.h"
#include "offload/residency/thread_steps.h"

// In which order backward is expected to use what went away, and fetching that ahead; tape.cc has the rest.
namespace ebb {

void Tape::recall_order_locked() {
  const std::size_t count = entries_.size();
  part_of_.clear();
  last_part_.clear();
  held_bytes_.reset();
  part_ = 0;
  order_ = plan_ == nullptr ? book_->recall(signature_locked(), count) : planned_order_locked();
  rank_.resize(count);
  for (std::uint32_t rank = 0; rank < count; ++rank) {
    rank_[order_[rank]] = rank;
  }
  fetched_to_ = 0;
  ++resets_;
}

// As the plan has it; what is not in it, last.
std::vector<std::uint32_t> Tape::planned_order_locked() {
  const BackwardRoom& room = plan_->room.backward;
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
  for (const BackwardRoom::CopyIn& copy : room.copies_in) {
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
  return plan_ != nullptr || book_->knows(signature_locked());
}

void Tape::fetch_early(c10::Stream stream) {
  tried_early_ = true;
  {
    const std::lock_guard lock(mutex_);
    if (in_use_ || last_stream_ != stream || (plan_ == nullptr && !book_->knows(signature_locked()))) {
      return;
    }
    forget_gone_locked();
    recall_order_locked();
  }
  static_cast<void>(fetch_ahead());
}

bool Tape::fetch_ahead() {
  std::vector<std::shared_ptr<Prefetchable>> asked;  // if the graph is dropped meanwhile, they end after the lock
  const std::unique_lock one_at_a_time(fetch_mutex_, std::try_to_lock);
  if (!one_at_a_time) {
    return false;
  }
  while (true) {
    std::shared_ptr<Prefetchable> next;
    Id id = 0;
    std::size_t rank = 0;
    std::uint64_t resets = 0;
    std::optional<std::uint64_t> held_bytes;
    {
      const std::lock_guard lock(mutex_);
      const std::size_t from = device_is_full_ ? cursor_ : std::max(cursor_, fetched_to_);
      for (rank = from; rank < order_.size() && next == nullptr; ++rank) {
        if (entries_[order_[rank]].used_in != pass_) {
          next = entries_[order_[rank]].storage.lock();
        }
      }
      if (device_is_full_ && next != nullptr && rank <= fetched_to_) {
        return false;
      }
      fetched_to_ = next == nullptr ? rank : rank - 1;
      resets = resets_;
      if (next != nullptr) {
        held_bytes = held_bytes_locked(rank - 1);
        Entry& entry = entries_[order_[rank - 1]];
        id = entry.id;
        guesses_locked(entry);
      }
    }
    if (next == nullptr) {
      return true;
    }
    asked.push_back(next);
    prefetches_now();
    if (!next->fetch_ahead(held_bytes)) {
      return false;
    }
    const std::lock_guard lock(mutex_);
    if (const std::optional<std::uint32_t> index = index_locked(id)) {
      guesses_locked(entries_[*index]);
    }
    prefetches_now();         // if somebody has meanwhile asked for room and passed over this copy
    if (resets_ == resets) {  // else what was before this rank may have been given up meanwhile
      fetched_to_ = std::max(fetched_to_, rank);
    }
  }
}

// Before the copy is started, so that whoever asks for room at the same time finds it.
void Tape::prefetches_now() {
  if (!prefetching_.exchange(true)) {
    steps_->prefetches(weak_from_this());
  }
}

void Tape::make_room(const std::function<bool()>& enough) {
  {
    const std::lock_guard lock(mutex_);
    device_is_full_ = true;
  }
  drop_guesses(enough);
}

// Before the copy is started, too.
void Tape::guesses_locked(Entry& entry) {
  if (!std::exchange(entry.guessed, true)) {
    guesses_.push_back(entry.id);
  }
}

// What is needed last comes first. Only what was fetched ahead is looked at: the step may be long, and its backward run
// in many parts.
std::vector<Tape::Id> Tape::take_guesses_locked() {
  std::vector<Id> taken = std::exchange(guesses_, {});
  std::erase_if(taken, [this](Id id) { return !index_locked(id); });
  for (const Id id : taken) {
    entries_[*index_locked(id)].guessed = false;
  }
  if (order_.size() == entries_.size()) {
    std::ranges::sort(taken, std::greater<>(), [this](Id id) { return rank_[*index_locked(id)]; });
  } else {  // some came or went since: the first saved is taken to be needed last
    std::ranges::sort(taken);
  }
  return taken;
}

void Tape::drop_guesses(const std::function<bool()>& enough) {
  prefetching_ = false;
  std::vector<Id> guesses;
  {
    const std::lock_guard lock(mutex_);
    guesses = take_guesses_locked();
    fetched_to_ = 0;
    ++resets_;
  }
  for (auto guess = guesses.begin(); guess != guesses.end(); ++guess) {
    if (enough()) {
      const std::lock_guard lock(mutex_);
      std::for_each(guess, guesses.end(), [this](Id id) {
        if (const std::optional<std::uint32_t> index = index_locked(id)) {
          guesses_locked(entries_[*index]);
        }
      });
      prefetches_now();
      return;
    }
    std::shared_ptr<Prefetchable> storage;
    {
      const std::lock_guard lock(mutex_);
      const std::optional<std::uint32_t> index = index_locked(*guess);
      storage = index ? entries_[*index].storage.lock() : nullptr;
    }
    if (storage != nullptr) {
      storage->drop_guess();
    }
  }
}

}  // namespace ebb

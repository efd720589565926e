#include "offload/steps/access_history.h"

#include <utility>

#include "offload/accounts/gauge.h"

namespace ebb {

void AccessHistory::remember(std::uint64_t signature, std::vector<std::uint32_t> observed) {
  const MutexLock lock(mutex_);
  std::erase_if(orders_, [&](const Order& order) { return order.signature == signature; });
  orders_.push_front({signature, std::move(observed)});
  if (orders_.size() > kMaxOrders) {
    orders_.pop_back();
  }
}

void AccessHistory::remember_sizes(std::uint64_t saved_bytes, std::uint64_t largest_bytes) {
  if (saved_bytes != 0) {
    ended_.saved_bytes = saved_bytes;
    ended_.largest_bytes = largest_bytes;
  }
  lower_sizes();
}

void AccessHistory::raise_sizes(std::uint64_t saved_bytes, std::uint64_t largest_bytes) {
  raise_to(under_way_.saved_bytes, saved_bytes);
  raise_to(under_way_.largest_bytes, largest_bytes);
}

void AccessHistory::lower_sizes() {
  under_way_.saved_bytes = 0;
  under_way_.largest_bytes = 0;
}

bool AccessHistory::knows(std::uint64_t signature) const {
  const MutexLock lock(mutex_);
  return find_locked(signature) != orders_.end();
}

std::deque<AccessHistory::Order>::const_iterator AccessHistory::find_locked(std::uint64_t signature) const {
  return std::find_if(orders_.begin(), orders_.end(), [&](const Order& order) { return order.signature == signature; });
}

std::vector<std::uint32_t> AccessHistory::recall(std::uint64_t signature, std::size_t count) const {
  std::vector<std::uint32_t> order;
  order.reserve(count);
  std::vector<bool> seen(count, false);
  {
    const MutexLock lock(mutex_);
    const auto known = find_locked(signature);
    if (known != orders_.end()) {
      for (const std::uint32_t position : known->positions) {
        if (position < count && !seen[position]) {  // signatures may collide, so no position is trusted
          seen[position] = true;
          order.push_back(position);
        }
      }
    }
  }
  for (std::size_t position = count; position-- > 0;) {
    if (!seen[position]) {
      order.push_back(static_cast<std::uint32_t>(position));
    }
  }
  return order;
}

}  // namespace ebb

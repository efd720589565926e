#include "offload/managed/use_order.h"

#include <iterator>
#include <utility>

namespace ebb {

void UseOrder::add(UseHistory::Item item) {
  if (item >= known_.size()) {
    known_.resize(item + 1);
  }
  Known& known = known_[item];
  known.key.item = item;
  keys(known.where).insert(known.key);
}

void UseOrder::put(UseHistory::Item item, Where where, UseHistory::Place next) noexcept {
  Known& known = known_[item];
  if (known.where == where && known.key.next == next) {
    return;
  }
  Keys::node_type node = keys(known.where).extract(known.key);
  known = {{next, item}, where};
  node.value() = known.key;
  keys(where).insert(std::move(node));
}

std::optional<UseOrder::Key> UseOrder::last(Where where, const std::optional<Key>& before) const {
  const auto found = before ? keys(where).upper_bound(*before) : keys(where).begin();
  return found == keys(where).end() ? std::nullopt : std::optional(*found);
}

std::optional<UseOrder::Key> UseOrder::first(Where where, const std::optional<Key>& after) const {
  const auto end = after ? keys(where).lower_bound(*after) : keys(where).end();
  return end == keys(where).begin() ? std::nullopt : std::optional(*std::prev(end));
}

}  // namespace ebb

#include "offload/tensors/deferred_copies.h"

#include <utility>

#include <ATen/SequenceNumber.h>

#include "offload/steps/saved_storage.h"

namespace ebb {

thread_local DeferredCopies DeferredCopies::here_;

void DeferredCopies::add(const std::shared_ptr<SavedStorage>& saved) {
  entries_.push_back(saved);
  next_node_ = at::sequence_number::peek();
}

void DeferredCopies::start_if_finished() noexcept {
  if (next_node_ != at::sequence_number::peek()) {
    start_all();
  }
}

void DeferredCopies::start_all() noexcept {
  for (const std::weak_ptr<SavedStorage>& each : std::exchange(entries_, {})) {
    if (const std::shared_ptr<SavedStorage> saved = each.lock()) {
      saved->offload_deferred();
    }
  }
}

}  // namespace ebb

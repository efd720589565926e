#include "offload/tensors/put_off.h"

#include <utility>

#include <ATen/SequenceNumber.h>

#include "offload/residency/saved_storage.h"

namespace ebb {

PutOff& PutOff::of_this_thread() {
  thread_local PutOff put_off;
  return put_off;
}

void PutOff::add(const std::shared_ptr<SavedStorage>& saved) {
  entries_.push_back(saved);
  next_node_ = at::sequence_number::peek();
}

void PutOff::start_finished() noexcept {
  if (!entries_.empty() && next_node_ != at::sequence_number::peek()) {
    start_all();
  }
}

void PutOff::start_all() noexcept {
  for (const std::weak_ptr<SavedStorage>& each : std::exchange(entries_, {})) {
    if (const std::shared_ptr<SavedStorage> saved = each.lock()) {
      saved->send_out_now();
    }
  }
}

}  // namespace ebb

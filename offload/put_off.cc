#include "offload/put_off.h"

#include <ATen/SequenceNumber.h>

#include "offload/log.h"
#include "offload/saved_storage.h"

namespace ebb {

PutOff& PutOff::of_this_thread() {
  thread_local PutOff put_off;
  return put_off;
}

void PutOff::add(const std::shared_ptr<SavedStorage>& saved) {
  entries_.push_back(saved);
  next_node_ = at::sequence_number::peek();
}

void PutOff::start_finished() {
  if (!entries_.empty() && next_node_ != at::sequence_number::peek()) {
    start();
  }
}

void PutOff::start_all() noexcept {
  while (!entries_.empty()) {
    try {
      start();
    } catch (...) {
      log_warning("a copy out could not be started; the saved tensor stays on the device");
    }
  }
}

void PutOff::start() {
  while (!entries_.empty()) {
    const std::shared_ptr<SavedStorage> saved = entries_.front().lock();
    entries_.erase(entries_.begin());
    if (saved != nullptr) {
      saved->send_out_now();
    }
  }
}

}  // namespace ebb

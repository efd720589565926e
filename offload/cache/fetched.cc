#include "offload/cache/fetched.h"

namespace ebb {

Fetched::~Fetched() {
  if (!waited_for_) {
    tier_.wait_or_block(WaitPoint::kUnusedAfterIn, stream_, arrived_);
  }
}

c10::Storage Fetched::get() {
  tier_.wait(WaitPoint::kUseAfterIn, stream_, arrived_);
  waited_for_ = true;
  if (arrived_ != nullptr) {
    tier_.used(stream_, storage_.data(), storage_.nbytes());
  }
  return storage_;
}

}  // namespace ebb

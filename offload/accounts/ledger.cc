#include "offload/accounts/ledger.h"

#include <optional>
#include <string>
#include <utility>

#include <c10/core/StorageImpl.h>

#include "offload/base/human_bytes.h"
#include "offload/base/log.h"

namespace ebb {
namespace {

class CountedStorageImpl final : public c10::StorageImpl {
 public:
  CountedStorageImpl(c10::DataPtr memory, std::size_t bytes, c10::Allocator* allocator, DeviceAccount::Held on_device)
      : StorageImpl(use_byte_size_t(), bytes, std::move(memory), allocator, /*resizable=*/true),
        on_device_(std::move(on_device)) {}

  // Called when the last tensor lets go, though weak references may live on.
  void release_resources() override {
    StorageImpl::release_resources();
    on_device_.reset();
  }

 private:
  std::optional<DeviceAccount::Held> on_device_;
};

}  // namespace

void Ledger::count_offloaded(std::uint64_t bytes) {
  counters_.offloaded.add(bytes);
  if (debug_log_wanted()) {
    log_debug("offload " + human_bytes(bytes));
  }
}

void Ledger::count_dropped(std::uint64_t bytes) {
  counters_.dropped.add(bytes);
  if (debug_log_wanted()) {
    log_debug("drop " + human_bytes(bytes));
  }
}

void Ledger::count_evicted(std::uint64_t bytes) {
  counters_.evicted.add(bytes);
  if (!warned_of_eviction_.exchange(true)) {
    log_warning(
        "the device has no memory left, or the program asked for room: saved tensors that were to stay are copied out, "
        "and backward waits for some of them. Options::device_budget plans that in advance.");
  }
}

void Ledger::count_kept(KeptReason reason, std::uint64_t bytes) {
  counters_.kept[static_cast<std::size_t>(reason)].add(bytes);
  if (debug_log_wanted()) {
    log_debug("keep " + human_bytes(bytes) + ": " + std::string(to_string(reason)));
  }
}

c10::Storage Ledger::counted(c10::DataPtr memory, std::size_t bytes, DeviceAccount::Held::What what) {
  c10::Allocator* const allocator = c10::GetAllocator(memory.device().type());
  return c10::Storage(c10::make_intrusive<CountedStorageImpl>(std::move(memory), bytes, allocator, hold(bytes, what)));
}

}  // namespace ebb

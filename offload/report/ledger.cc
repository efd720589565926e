#include "offload/report/ledger.h"

#include <string>
#include <utility>

#include "offload/base/human_bytes.h"
#include "offload/base/log.h"
#include "offload/report/counted_storage.h"

namespace ebb {

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
  return counted_storage(std::move(memory), bytes, hold(bytes, what));
}

}  // namespace ebb

#include "offload/stats.h"

#include <ostream>
#include <string>

#include <fmt/format.h>

#include "offload/base/human_bytes.h"

namespace ebb {
namespace {

std::string line(std::string_view name, const Count& count) {
  return fmt::format("{:<32}{:>14}{:>14}\n", name, count.tensors, human_bytes(count.bytes));
}

std::string line(std::string_view name, const Level& level) {
  return fmt::format("{:<32}{:>14}{:>14}{:>14}\n", name, human_bytes(level.now_bytes), human_bytes(level.peak_bytes),
                     level.capacity_bytes == 0 ? "-" : human_bytes(level.capacity_bytes));
}

std::string line_if_any(std::string_view name, const Count& count) {
  return count.tensors == 0 ? "" : line(name, count);
}

}  // namespace

std::string_view to_string(KeptReason reason) {
  constexpr std::array<std::string_view, kKeptReasons> kNames{"parameter", "excluded",   "other device", "empty",
                                                              "unmovable", "non-owning", "policy",       "no room",
                                                              "captured",  "deferred"};
  return kNames[static_cast<std::size_t>(reason)];
}

std::ostream& operator<<(std::ostream& out, const Stats& stats) {
  std::string text = fmt::format("{:<32}{:>14}{:>14}\n", fmt::format("in {} steps", stats.steps), "tensors", "bytes");
  text += line("saved", stats.saved);
  text += line("  offloaded", stats.offloaded);
  text += line("  dropped", stats.dropped);
  text += line("  saved before", stats.deduplicated);
  for (std::size_t i = 0; i < kKeptReasons; ++i) {
    text += line_if_any(fmt::format("  kept: {}", to_string(static_cast<KeptReason>(i))), stats.kept[i]);
  }
  text += line_if_any("evicted", stats.evicted);
  if (stats.managed.tensors > 0) {
    text += line("managed", stats.managed);
    text += line("  prefetched", stats.managed_prefetched);
    text += line("  fetched late", stats.managed_fetched_late);
    text += line_if_any("  evicted", stats.managed_evicted);
  }
  text += line("fetched", stats.fetched);
  text += line("still on the device", stats.reused);
  text += line_if_any("  held by the program", stats.still_held);
  text += line("recomputed", stats.recomputed);
  text += fmt::format("{:<32}{:>14}{:>14}{:>14}\n", "", "now", "peak", "bound");
  text += line("saved on the device", stats.saved_on_device);
  text += line("  if all had stayed", stats.saved_if_kept);
  text += line("  stash", stats.stash);
  text += line("  window", stats.window);
  if (stats.managed.tensors > 0 || stats.managed_on_device.peak_bytes > 0) {
    text += line("managed on the device", stats.managed_on_device);
  }
  if (stats.managed_resident.capacity_bytes > 0) {
    text += line("  that stay there", stats.managed_resident);
  }
  text += line("host memory or spill file", stats.pool);
  text += fmt::format("the device waited {} times, {:.1f} ms in all\n", stats.stalls, stats.stalled_ms);
  return out << text;
}

}  // namespace ebb

#include "offload/accounts/summary.h"

#include <algorithm>

#include <fmt/format.h>

#include "offload/base/human_bytes.h"

namespace ebb {
namespace {

std::uint64_t gone_bytes(const Stats& stats) {
  return stats.offloaded.bytes + stats.dropped.bytes + stats.evicted.bytes;
}

// What was on the device at most, with what the program has held there itself in a step: at most what would have been
// there had all stayed.
std::uint64_t peak_bytes(const Stats& stats) {
  const std::uint64_t by_ebb = stats.saved_on_device.peak_bytes;
  const std::uint64_t by_program = stats.still_held.bytes / std::max<std::uint64_t>(1, stats.steps);
  return std::min(by_ebb + by_program, std::max(stats.saved_if_kept.peak_bytes, by_ebb));
}

// Whether the peak is lower by a few percent than with everything kept. A smaller gain is not worth a copy.
bool has_gained(const Stats& stats) {
  constexpr double kFewPercent = 0.05;
  return static_cast<double>(peak_bytes(stats)) <
         (1 - kFewPercent) * static_cast<double>(stats.saved_if_kept.peak_bytes);
}

// Whether a step moved, on average, at least a tenth of the most bytes that would have been saved at once.
bool has_moved_much(const Stats& stats) {
  constexpr double kMuch = 0.1;
  return static_cast<double>(gone_bytes(stats)) >=
         kMuch * static_cast<double>(stats.steps) * static_cast<double>(stats.saved_if_kept.peak_bytes);
}

std::string of_saved(const Stats& stats) {
  const std::uint64_t peak = peak_bytes(stats);
  const std::uint64_t if_kept = stats.saved_if_kept.peak_bytes;
  if (stats.steps == 0 && gone_bytes(stats) == 0) {  // nobody was asked about a storage
    return stats.saved.tensors == 0
               ? "nothing was saved under a guard"
               : fmt::format("saved tensors took at most {} of the device, and none was one that may leave it",
                             human_bytes(peak));
  }
  std::string text =
      fmt::format("in {} steps saved tensors took at most {} of the device", stats.steps, human_bytes(peak));
  if (gone_bytes(stats) == 0) {
    return text + ", and none left it";
  }
  text += fmt::format(
      ", and {} had they stayed ({:+.0f} %); {} were offloaded and {} recomputed; the device waited {:.1f} ms",
      human_bytes(if_kept), if_kept == 0 ? 0.0 : 100 * (static_cast<double>(peak) / static_cast<double>(if_kept) - 1),
      human_bytes(stats.offloaded.bytes + stats.evicted.bytes), human_bytes(stats.recomputed.bytes), stats.stalled_ms);
  return text;
}

std::string of_managed(const Stats& stats) {
  const std::uint64_t late = stats.managed_fetched_late.bytes;
  return fmt::format("managed tensors took at most {} of the device, and {} were fetched, {} of them late",
                     human_bytes(stats.managed_on_device.peak_bytes),
                     human_bytes(stats.managed_prefetched.bytes + late), human_bytes(late));
}

}  // namespace

std::string summary(const Stats& stats) {
  return stats.managed_on_device.peak_bytes == 0 ? of_saved(stats) : of_saved(stats) + "; " + of_managed(stats);
}

std::vector<std::string> warnings(const Stats& stats, const std::vector<Matches>& matches) {
  std::vector<std::string> found;
  if (stats.steps < kEnoughSteps) {
    return found;
  }
  if (has_moved_much(stats) && !has_gained(stats)) {
    found.push_back(fmt::format(
        "{} left the device for nothing: saved tensors took {} of it at most, and would have taken {} had all stayed. "
        "What backward wants at once is better kept (NoOpGuard), a few large storages may all fit into stash and "
        "window (Options::stash_bytes, window_bytes), and Options::device_budget plans what is worth moving.",
        human_bytes(gone_bytes(stats)), human_bytes(peak_bytes(stats)), human_bytes(stats.saved_if_kept.peak_bytes)));
  }
  if (stats.still_held.bytes * 2 > gone_bytes(stats)) {
    found.push_back(fmt::format(
        "the program has held {} of the {} that left the device, so that this has freed nothing: exclude what it "
        "holds (Offloader::exclude), or let go of it before backward",
        human_bytes(stats.still_held.bytes), human_bytes(gone_bytes(stats))));
  }
  for (const Matches& each : matches) {
    if (each.asked > 0 && each.matched == 0) {
      found.push_back(fmt::format("the policy {} matched none of the {} storages that it was asked about", each.policy,
                                  each.asked));
    }
  }
  return found;
}

}  // namespace ebb

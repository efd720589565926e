#include "offload/plans/measure_link.h"

#include <algorithm>
#include <chrono>
#include <limits>
#include <utility>
#include <vector>

#include <c10/util/ScopeExit.h>

#include "streams/base/after.h"

namespace ebb {
namespace {

constexpr int kRows = 3;

// The rate of the fastest of a few rows of copies, because every disturbance makes a copy slower. The copies of a row
// are waited for together; otherwise the host's own time would show. `last`: the ticket that the first copy starts
// behind; afterwards the ticket of the last copy that was started.
template <typename Copy>
double bytes_per_ms(std::size_t bytes, const std::vector<Block>& blocks, Ticket& last, Copy copy) {
  double least_ms = std::numeric_limits<double>::infinity();
  for (int i = 0; i < kRows; ++i) {
    const auto start = std::chrono::steady_clock::now();
    for (const Block& block : blocks) {
      last = copy(block, last);
    }
    last->synchronize();
    const std::chrono::duration<double, std::milli> ms = std::chrono::steady_clock::now() - start;
    least_ms = std::min(least_ms, ms.count() / static_cast<double>(blocks.size()));
  }
  return static_cast<double>(bytes) / std::max(least_ms, 1e-3);
}

}  // namespace

LinkRates measure_link(Tier& tier) {
  LinkRates rates;
  const bool is_gpu = tier.device().is_cuda();
  const std::size_t bytes = std::size_t{is_gpu ? 32U : 4U} << 20;  // beside which a copy's fixed cost does not show
  const std::size_t most = is_gpu ? 8 : 4;
  std::vector<Block> blocks;  // for each copy its own, because not all host memory is equally near to the device
  for (std::optional<Block> block; blocks.size() < most && (block = tier.try_acquire(bytes));) {
    blocks.push_back(*std::move(block));
  }
  if (blocks.empty()) {
    return rates;
  }
  try {
    const c10::DataPtr memory = tier.allocate(bytes);
    Ticket last;
    const auto no_copy_runs_on =
        c10::make_scope_exit([&last] {  // if a later copy could not be started, earlier copies may still run
          try {
            if (last != nullptr) {
              last->synchronize();
            }
          } catch (...) {  // a copy that has failed is over
          }
        });
    // Each copy starts behind the one before, because all use the same device memory. The first starts behind the
    // stream's work, because the host may have freed this memory while the stream still used it.
    const auto after = [stream = tier.current_stream()](const Ticket& before) {
      After after(WaitPoint::kCaller, stream);
      after.add(WaitPoint::kCaller, before);
      return after;
    };
    rates.out_bytes_per_ms = bytes_per_ms(bytes, blocks, last, [&](const Block& block, const Ticket& before) {
      return tier.copy_out(block, memory.get(), after(before));
    });
    rates.in_bytes_per_ms = bytes_per_ms(bytes, blocks, last, [&](const Block& block, const Ticket& before) {
      return tier.copy_in(memory.get(), block, after(before));
    });
  } catch (const c10::OutOfMemoryError&) {
  }
  return rates;
}

}  // namespace ebb

#pragma once

#include <cstdint>
#include <memory>
#include <optional>

#include <c10/core/Storage.h>

#include "offload/report/gauge.h"
#include "offload/report/ledger.h"
#include "offload/residency/bounds.h"
#include "offload/residency/evictable.h"
#include "offload/residency/order_book.h"
#include "offload/residency/stall_watch.h"
#include "offload/residency/stash.h"
#include "offload/residency/storage_table.h"
#include "offload/residency/thread_steps.h"
#include "streams/base/process_mark.h"
#include "streams/base/tier.h"
#include "streams/base/trace.h"

namespace ebb {

// What all storages of one offloader share: where their bytes go, how much of them the device may hold, and what is
// counted. Nothing of policies nor of autograd.
//
// Threads: every member may be called from any thread.
class Residency {
 public:
  struct Config {
    bool record_timeline = false;
    bool planned = false;                        // limits are as each step's plan has them
    std::optional<std::uint64_t> stash_bytes{};  // without a plan, as the next; nullopt: a share of what steps save
    std::optional<std::uint64_t> window_bytes{};
    void (*free_unused)() noexcept = nullptr;  // called first where the device is full; null for nothing
  };

  // `trace`: as it was given to the tier; null for none.
  Residency(const Config& config, std::shared_ptr<Tier> tier, std::shared_ptr<Trace> trace);
  Residency(const Residency&) = delete;
  Residency& operator=(const Residency&) = delete;

  // Throws c10::Error in a forked child, where no other member may be called.
  void check_process() const { process_.check("this offloader"); }
  [[nodiscard]] bool forked() const noexcept { return process_.forked(); }

  [[nodiscard]] Tier& tier() { return *tier_; }
  [[nodiscard]] const std::shared_ptr<Tier>& shared_tier() const { return tier_; }
  [[nodiscard]] Trace* trace() { return trace_.get(); }  // null for none
  [[nodiscard]] const Bounds& bounds() const { return *bounds_; }
  [[nodiscard]] Ledger& ledger() { return ledger_; }
  [[nodiscard]] Stash& stash() { return stash_; }
  [[nodiscard]] Gauge& window() { return window_; }
  [[nodiscard]] Gauge& retained() { return retained_; }  // sources that are kept for backward, bounded as the stash
  [[nodiscard]] Evictable& evictable() { return evictable_; }
  [[nodiscard]] StorageTable& table() { return table_; }
  [[nodiscard]] StepsOfThreads& steps() { return steps_; }
  [[nodiscard]] const std::shared_ptr<OrderBook>& book() const { return book_; }
  [[nodiscard]] StallWatch& stall_watch() { return stall_watch_; }

  // Stands for the bytes in tensors that only carry sizes and flags.
  [[nodiscard]] const c10::Storage& no_bytes() const { return no_bytes_; }

  // Lets go of at least so much device memory, if it can: of sources whose copies out are under way, for which the
  // streams wait, of what was fetched ahead, and then of what the policy has kept. Returns how much it was. Waits for
  // no lock under which device memory is asked for: whoever calls this may hold the device allocator's. Nothing while
  // the calling thread asks for memory to fetch ahead: a guess must not cost what backward wants next.
  std::uint64_t evict(std::uint64_t bytes) noexcept;

  // Whether the calling thread does.
  [[nodiscard]] static bool fetches_ahead_here();

  // Lives while it does.
  class FetchingAhead {
   public:
    FetchingAhead();
    ~FetchingAhead();
    FetchingAhead(const FetchingAhead&) = delete;
    FetchingAhead& operator=(const FetchingAhead&) = delete;

   private:
    const bool before_;
  };

 private:
  const ProcessMark process_;
  const std::shared_ptr<Tier> tier_;
  const std::shared_ptr<Trace> trace_;
  const c10::Storage no_bytes_;
  const std::shared_ptr<OrderBook> book_ = std::make_shared<OrderBook>();
  StallWatch stall_watch_;
  const std::unique_ptr<const Bounds> bounds_;
  void (*const free_unused_)() noexcept;
  Ledger ledger_;
  Gauge window_;
  Gauge retained_;
  StorageTable table_;
  StepsOfThreads steps_;
  Evictable evictable_;
  Stash stash_;  // last: it lets go of device memory, which the gauges above count
};

}  // namespace ebb

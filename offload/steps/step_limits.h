#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <utility>

#include "offload/residency/staging_limits.h"
#include "offload/steps/access_history.h"
#include "offload/steps/stall_monitor.h"

namespace ebb {

class SavedStep;

// The limits of stash and window, as steps see them. AdaptiveLimits serve without a budget, PlannedLimits with one.
//
// Threads: every member may be called from any thread.
class StepLimits : public StagingLimits {
 public:
  using StagingLimits::stash;

  // The limit of the stash after the save of a step's storage. `ordinal`: as Candidate::ordinal.
  [[nodiscard]] virtual std::uint64_t stash(SavedStep& step, std::uint32_t ordinal) const = 0;
};

// The limits that the user has set, or else shares of the bytes that steps save.
class AdaptiveLimits final : public StepLimits {
 public:
  AdaptiveLimits(std::optional<std::uint64_t> stash_bytes, std::optional<std::uint64_t> window_bytes,
                 std::shared_ptr<const AccessHistory> history, const StallMonitor& stall_monitor)
      : stash_bytes_(stash_bytes),
        window_bytes_(window_bytes),
        history_(std::move(history)),
        stall_monitor_(stall_monitor) {}

  [[nodiscard]] std::uint64_t stash() const override;
  [[nodiscard]] std::uint64_t stash(SavedStep& step, std::uint32_t ordinal) const override;
  [[nodiscard]] std::uint64_t window() const override;
  [[nodiscard]] bool sources_beside_window() const override;

 private:
  [[nodiscard]] std::uint64_t share(std::uint64_t of_step) const;

  const std::optional<std::uint64_t> stash_bytes_;
  const std::optional<std::uint64_t> window_bytes_;
  const std::shared_ptr<const AccessHistory> history_;
  const StallMonitor& stall_monitor_;
};

// The limits of the step's plan. A step without a plan takes the least memory: stash and
// window hold one storage at a time.
class PlannedLimits final : public StepLimits {
 public:
  [[nodiscard]] std::uint64_t stash() const override { return 0; }
  [[nodiscard]] std::uint64_t stash(SavedStep& step, std::uint32_t ordinal) const override;
  [[nodiscard]] std::uint64_t window() const override { return 0; }
  [[nodiscard]] bool sources_beside_window() const override { return false; }
};

}  // namespace ebb

#pragma once

#include <cstdint>
#include <memory>
#include <optional>

#include "offload/residency/order_book.h"
#include "offload/residency/stall_watch.h"

namespace ebb {

class Tape;

// How many bytes stash and window may hold. Two strategies: without a budget, and as a step's plan has it.
//
// Threads: every member may be called from any thread.
class Bounds {
 public:
  virtual ~Bounds() = default;

  // Of sources whose copies out are under way.
  [[nodiscard]] virtual std::uint64_t stash() const = 0;

  // The same after the save of a step's storage. `ordinal`: as Candidate::ordinal.
  [[nodiscard]] virtual std::uint64_t stash(Tape& tape, std::uint32_t ordinal) const = 0;

  // Of what is prefetched.
  [[nodiscard]] virtual std::uint64_t window() const = 0;

  // Whether sources that are kept for backward take no room in the window.
  [[nodiscard]] virtual bool sources_beside_window() const = 0;
};

// As the user has set them, or else shares of what steps save.
class StepBounds final : public Bounds {
 public:
  StepBounds(std::optional<std::uint64_t> stash_bytes, std::optional<std::uint64_t> window_bytes,
             std::shared_ptr<const OrderBook> book, const StallWatch& stall_watch)
      : stash_bytes_(stash_bytes), window_bytes_(window_bytes), book_(std::move(book)), stall_watch_(stall_watch) {}

  [[nodiscard]] std::uint64_t stash() const override;
  [[nodiscard]] std::uint64_t stash(Tape& tape, std::uint32_t ordinal) const override;
  [[nodiscard]] std::uint64_t window() const override;
  [[nodiscard]] bool sources_beside_window() const override;

 private:
  [[nodiscard]] std::uint64_t share(std::uint64_t of_step) const;

  const std::optional<std::uint64_t> stash_bytes_;
  const std::optional<std::uint64_t> window_bytes_;
  const std::shared_ptr<const OrderBook> book_;
  const StallWatch& stall_watch_;
};

// A step without a plan takes the least memory: one storage at a time.
class PlannedBounds final : public Bounds {
 public:
  [[nodiscard]] std::uint64_t stash() const override { return 0; }
  [[nodiscard]] std::uint64_t stash(Tape& tape, std::uint32_t ordinal) const override;
  [[nodiscard]] std::uint64_t window() const override { return 0; }
  [[nodiscard]] bool sources_beside_window() const override { return false; }
};

}  // namespace ebb

#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "policy/managed_use.h"

namespace ebb {

// The uses of managed storages in one period of a training loop, for a plan. A period lasts from the beginning of a
// step to the beginning of the next, so that the optimizer's uses count, whenever the optimizer runs. Not kept are
// - a period without a backward pass, or with one that failed;
// - a period in which states were made: an optimizer makes them for all parts of a parameter at once, and so uses them
//   as it never does again;
// - the uses after the last one that writes, between steps: evaluation reads there.
//
// Threads: one at a time.
class UseLog {
 public:
  // A period with more uses is not kept.
  static constexpr std::size_t kMostUses = std::size_t{1} << 17;

  void step_begins();
  void backward_begins();
  void backward_is_over(bool failed);

  // Says that the uses from here on are another operation's.
  void operation_begins() { ++operation_; }

  // Notes a use, once for each item of an operation.
  void use(std::uint32_t item, std::uint64_t bytes, bool written);

  // Notes that a storage has been made, with its bytes. `follows`: one that follows another in its place, as gradients
  // do, and not a state.
  void made(std::uint32_t item, std::uint64_t bytes, bool follows);

  // The uses in the last period that was kept; nullopt before there is one.
  [[nodiscard]] const std::optional<std::vector<ManagedUse>>& last_period() const { return last_; }

 private:
  void note(const ManagedUse& use);

  std::optional<std::vector<ManagedUse>> last_;
  std::vector<ManagedUse> now_;
  Phase phase_ = Phase::kForward;
  std::uint32_t operation_ = 0;
  bool has_begun_ = false;
  bool had_backward_ = false;
  bool is_usual_ = true;  // nothing has failed, and no states were made
};

}  // namespace ebb

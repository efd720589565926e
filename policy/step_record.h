#pragma once

#include <compare>
#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "policy/managed_use.h"
#include "policy/policy.h"

namespace ebb {

// The facts about one storage that autograd saved in a step. Times are milliseconds since the step began, on the clock
// of the compute stream as if nothing that ebb does took time.
struct StorageRecord {
  static constexpr std::uint32_t kAlone = 0xFFFFFFFF;

  std::uint64_t bytes = 0;
  double saved_ms = 0;  // the bytes are complete, and a copy out may start
  double idle_ms = 0;   // the forward pass lets go of the storage, at needed_ms at the latest; until then it is part of
                       // the other memory. A value before saved_ms counts as saved_ms; without other memory, it is that
  double needed_ms = 0;           // backward first asks for the storage
  double released_ms = 0;         // the storage's last save ends; at least needed_ms
  std::uint64_t other_bytes = 0;  // the other memory at needed_ms, before backward goes on

  Recompute recompute = Recompute::kNo;
  double recompute_ms = 0;            // the time of the recipe's operation alone, with its inputs on the device
  std::uint64_t recompute_bytes = 0;  // the memory that the operation takes besides its inputs and its result
  std::uint32_t made_with = kAlone;   // the next of the storages that one run of the recipe makes together, as a
                                      // checkpointed region's does; the last names the first. They have the time and
                                      // the memory of the whole run, and the same inputs
  bool is_for_recipes = false;  // backward never asks for it, but recipes do: with no recipe run that has it among
                                // its inputs, nothing holds it
  std::vector<std::uint32_t> inputs{};  // the recipe's inputs, as indices into StepRecord::storages, each below the
                                        // storage's own; without inputs that stay on the device anyway
};

// The record of one forward and backward pass, from which a plan is made.
struct StepRecord {
  struct Level {
    double ms = 0;
    std::uint64_t bytes = 0;
  };

  std::vector<StorageRecord> storages;  // in the order of saving
  // The other memory: device memory besides these storages (parameters, gradients, temporaries, and storages that are
  // saved but still in use). A level lasts from its time to the next level's. In order of time; 0 before the first
  // level.
  std::vector<Level> other;
  double backward_ms = 0;  // backward begins
  double end_ms = 0;       // backward ends

  // What a plan is to decide together with the storages: the uses of managed storages in a period, in order. Empty: the
  // program manages nothing, or has set the bound itself. The other memory has the managed storages that were on the
  // device under the bound `managed_device_bytes`; 0: the other memory has none of them.
  std::vector<ManagedUse> managed{};
  std::uint64_t managed_device_bytes = 0;
  std::optional<std::uint64_t> managed_ahead_bytes{};  // how far ahead they are fetched, if the program says so
  bool is_preliminary = false;  // a later record will have the uses of managed storages, or more recipes
};

// Calls what(index) for the storage `i` and for all that are made with it.
template <typename What>
void for_each_made_with(const StepRecord& record, std::uint32_t i, const What& what) {
  std::uint32_t each = i;
  do {
    what(each);
    const std::uint32_t next = record.storages[each].made_with;
    each = next == StorageRecord::kAlone ? i : next;
  } while (each != i);
}

// The storages that nothing holds under these decisions: is_for_recipes. Empty: there are none.
[[nodiscard]] std::vector<bool> not_held(const StepRecord& record, const std::vector<Decision>& decisions);

// The record with each time, but for those that recipes take, as `later` has it, and so much more other memory.
[[nodiscard]] StepRecord changed(StepRecord record, const std::function<double(double)>& later,
                                 std::int64_t more_bytes);

// The record with all times, those that recipes take, too, in this proportion, and so much more other memory.
[[nodiscard]] StepRecord slowed(StepRecord record, double factor, std::int64_t more_bytes);

// A moment of a recorded step.
struct StepEvent {
  // Events at the same time are in this order, so a level that begins together with backward belongs to backward.
  enum class What : std::uint8_t { kBackward, kLevel, kSave, kIdle, kNeed, kRelease };

  double ms = 0;
  What what = What::kLevel;
  std::uint32_t index = 0;  // of the storage or the level

  friend auto operator<=>(const StepEvent&, const StepEvent&) = default;
};

// All events of a record, in order.
[[nodiscard]] std::vector<StepEvent> step_events(const StepRecord& record);

}  // namespace ebb

#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "policy/plan.h"
#include "policy/range_minimum.h"

namespace ebb {

// In which order a step's backward is expected to ask for the step's storages, and how far backward and the prefetches
// have come in that order. The order is what an earlier step has taught, or a plan's. The order only decides what is
// prefetched; backward may use the storages in any other order.
//
// An index is a storage's place among the step's; a rank is a place in the order.
//
// Threads: one at a time.
class ExpectedUses {
 public:
  static constexpr std::uint32_t kNotPlanned = 0xFFFFFFFF;  // as an ordinal

  struct Next {
    std::size_t rank;
    std::uint32_t index;
    std::uint64_t resets;                     // for prefetched()
    std::optional<std::uint64_t> held_bytes;  // with a plan: how many bytes ebb may hold with this storage
  };

  // Expects the storages in this order, a permutation of [0, size).
  void expect(std::vector<std::uint32_t> order);

  // Expects the storages in the order of the plan's copies in, and those that the plan does not list last, in the
  // reverse of saving. `ordinals`: by index, Candidate::ordinal or kNotPlanned.
  void expect(const Plan& plan, const std::vector<std::uint32_t>& ordinals);

  // Expects nothing any more, because the indices change.
  void forget();

  // Notes that backward has asked for this candidate. Under a plan the candidate tells which part of backward has
  // begun.
  void asked(std::uint32_t ordinal);

  // Notes that backward has asked for this storage.
  void used(std::uint32_t index);

  // Of the ranks from `from` on, the first storage that is to be prefetched; nullopt for none.
  [[nodiscard]] std::optional<Next> next(std::size_t from) const;

  // Notes that this storage is the next to be prefetched, or that every storage that backward still needs has been.
  // Returns false where the device is full, and the storage has been prefetched or tried before.
  bool starts(const Next& next);
  void all_are_prefetched() { prefetched_to_ = order_.size(); }

  // Notes that a storage is prefetched, unless prefetches of lower ranks may have been cancelled since next().
  void prefetched(const Next& next);

  // Notes that a prefetch has been cancelled. `device_is_full`: for the rest of this pass.
  void is_cancelled(bool device_is_full);

  // The order of the first pass over the graph, as indices.
  [[nodiscard]] const std::vector<std::uint32_t>& observed() const { return observed_; }

 private:
  static constexpr std::uint32_t kFirstPass = 1;

  void look_again();
  [[nodiscard]] std::optional<std::uint64_t> held_bytes(std::size_t rank) const;

  std::vector<std::uint32_t> order_;    // indices, by rank
  std::vector<std::uint32_t> rank_;     // by index
  std::vector<std::uint32_t> used_in_;  // by index: the last pass over the graph that has used the storage
  std::vector<std::uint32_t> observed_;
  std::uint32_t pass_ = kFirstPass;
  std::size_t cursor_ = 0;         // the rank after that of the last use
  std::size_t prefetched_to_ = 0;  // every unused storage of a lower rank has been prefetched
  std::uint64_t resets_ = 0;       // how often prefetched_to_ was set back to 0
  bool device_is_full_ = false;

  // With a plan.
  std::vector<std::uint32_t> part_of_;      // by ordinal, the part of backward that the candidate's need begins
  std::vector<std::uint32_t> last_part_;    // by rank, CopyIn::last_part or kNotPlanned
  std::optional<RangeMinimum> held_bytes_;  // PrefetchSchedule::held_bytes
  std::uint32_t part_ = 0;                  // the part that backward has come to
};

}  // namespace ebb

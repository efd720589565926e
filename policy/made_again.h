#pragma once

#include <cstdint>
#include <vector>

#include "policy/policy.h"
#include "policy/step_record.h"

namespace ebb {

// The storages that recipes have made so far, in a walk through a step under given decisions.
class MadeAgain {
 public:
  // `record` and `decisions` must outlive this object.
  MadeAgain(const StepRecord& record, const std::vector<Decision>& decisions)
      : record_(record), decisions_(decisions), made_(decisions.size()) {}

  [[nodiscard]] bool contains(std::uint32_t storage) const { return made_[storage]; }

  // Makes `storage`, if it is to be recomputed and has not been made yet; the recipe's inputs are made first. Calls
  // each(made), with the StorageRecord, for every storage that is made, in the order of making.
  template <typename Each>
  void add(std::uint32_t storage, const Each& each) {
    if (decisions_[storage] != Decision::kRecompute || made_[storage]) {
      return;
    }
    made_[storage] = true;
    for (const std::uint32_t input : record_.storages[storage].inputs) {
      add(input, each);
    }
    each(record_.storages[storage]);
  }

 private:
  const StepRecord& record_;
  const std::vector<Decision>& decisions_;
  std::vector<bool> made_;
};

}  // namespace ebb

#pragma once

#include <cstdint>
#include <vector>

#include "policy/policy.h"
#include "policy/step_record.h"

namespace ebb {

// Which storages recipes have made by now, in a walk through a step under some decisions.
class MadeAgain {
 public:
  // Both must outlive this.
  MadeAgain(const StepRecord& record, const std::vector<Decision>& decisions)
      : record_(record), decisions_(decisions), made_(decisions.size()) {}

  [[nodiscard]] bool contains(std::uint32_t storage) const { return made_[storage]; }

  // Makes `storage`, if that is to be recomputed and has not been yet, and before it what its recipe takes. Calls
  // each(made) for every storage that is made, a StorageRecord, in that order.
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

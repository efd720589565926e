#pragma once

#include <atomic>
#include <optional>
#include <string>
#include <vector>

#include "offload/runtime/decider.h"

namespace ebb {

// Without a budget the policy alone decides, and steps are not recorded.
//
// Threads: as Decider.
class PolicyDecider final : public Decider {
 public:
  using Decider::Decider;

  [[nodiscard]] DeviceAccount::Held::What passed_through() const override {
    return DeviceAccount::Held::What::kPassedThrough;
  }
  void found_no_room(SavedStep& /*step*/, std::uint64_t /*bytes*/) override {}
  [[nodiscard]] std::optional<RegionsPlace> region_begins(const std::vector<at::Tensor>& /*inputs*/,
                                                          SavedStep& /*step*/) override {
    return std::nullopt;
  }

  // Returns true where steps wait for copies, unless another of the thread's steps is in use, which needs the window.
  [[nodiscard]] bool backward_begins(SavedStep& step) override;
  void backward_is_over(SavedStep& /*step*/, bool /*failed*/) override {}

  [[nodiscard]] std::string explain() override { return "no plan: Options::device_budget is not set\n"; }
  [[nodiscard]] std::optional<PlanReport> plan_report() override { return std::nullopt; }
  [[nodiscard]] std::vector<std::string> warnings(const Stats& stats) override;

 private:
  void warn_of_head(SavedStep& step);

  std::atomic<bool> looked_for_head_{false};
};

}  // namespace ebb

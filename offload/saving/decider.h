#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "offload/options.h"
#include "offload/stats.h"
#include "policy/policy.h"
#include "streams/base/mutex.h"

namespace ebb {

class GraphRecipe;
class PlanFollower;
class Residency;
class SavedStep;
class SavedStorage;
class Steps;

// Decides what becomes of saved storages: as Options::policy says or, under a budget, as the plan does.
//
// Threads: every member may be called from any thread. The policy is never called from two threads at once.
class Decider {
 public:
  // `steps` and `residency` must outlive this. Throws as PlanFollower.
  Decider(const Options& options, Steps& steps, Residency& residency);
  ~Decider();
  Decider(const Decider&) = delete;
  Decider& operator=(const Decider&) = delete;

  // Null without Options::device_budget.
  [[nodiscard]] PlanFollower* plans() const { return plans_.get(); }

  // Storages with fewer bytes are kept, and `decide` is not asked about them.
  [[nodiscard]] std::uint64_t least_bytes() const { return least_bytes_; }

  struct Decided {
    Decision decision;
    std::unique_ptr<GraphRecipe> recipe;  // how to make the storage's bytes again; null for none, or none looked for
  };
  // What becomes of the storage of `tensor`, which is saved for the first time in this version and now enters `step`.
  // Throws what the policy throws, and c10::Error where a budget cannot be met.
  [[nodiscard]] Decided decide(const at::Tensor& tensor, SavedStorage& saved, SavedStep& step);

  // Says that a backward pass begins on this thread, probably on `step`. Returns whether the first copies in should
  // start at once: under a plan, or where steps wait for copies, unless another of the thread's steps is in use, which
  // needs the window.
  [[nodiscard]] bool backward_begins(SavedStep& step);

  // What the user should know at the offloader's end, a sentence each. Under a budget nothing: recorded steps move
  // whatever they can, and the others what the budget asks for.
  [[nodiscard]] std::vector<std::string> warnings(const Stats& stats);

 private:
  [[nodiscard]] Decision ask_policy(Candidate& candidate, SavedStep& step);
  void warn_of_head(SavedStep& step);

  Steps& steps_;
  Residency& residency_;
  const std::unique_ptr<PlanFollower> plans_;
  const std::shared_ptr<Policy> policy_;  // null under a budget
  const bool needs_operation_;
  const bool needs_recipes_;
  const std::uint64_t least_bytes_;
  Mutex policy_mutex_;  // is held over calls of the policy
  std::atomic<bool> looked_for_head_{false};
};

}  // namespace ebb

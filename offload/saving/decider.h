#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include <ATen/core/Tensor.h>

#include "offload/cache/recipe.h"
#include "offload/options.h"
#include "offload/recompute/log_recipe.h"
#include "offload/stats.h"
#include "policy/policy.h"
#include "streams/base/mutex.h"

namespace ebb {

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

  // Whether the operations under a guard are to be logged.
  [[nodiscard]] bool needs_recipes() const { return needs_recipes_; }

  // Storages with fewer bytes are kept, and `decide` is not asked about them.
  [[nodiscard]] std::uint64_t least_bytes() const { return least_bytes_; }

  // How to make a storage's bytes again.
  struct Found {
    std::unique_ptr<Recipe> recipe;  // null for none, or none looked for
    bool is_proven = false;
    bool is_awaited = false;  // a later step may have a proven one
    std::uint64_t proof = 0;  // for prove()
  };
  struct Decided {
    Decision decision;
    Found found;
  };
  // What becomes of the storage of `tensor`, which is saved for the first time in this version and now enters `step`.
  // Throws what the policy throws, and c10::Error where a budget cannot be met.
  //
  // `make_recipe`: makes the recipe, where the log is not to be asked. `save_value`: saves what a recipe begins from
  // and autograd does not save, and has decide_about_value() decide.
  [[nodiscard]] Decided decide(const at::Tensor& tensor, const std::shared_ptr<SavedStorage>& saved, SavedStep& step,
                               const MakeRecipe& make_recipe, const LogRecipe::SaveValue& save_value);

  // What becomes of a value of the calling thread's log that a recipe begins from, of which `saved` now has the bytes.
  // The same value gets the same answer in the whole step, and counts as one candidate. `may_be_made`: whether a recipe
  // is to be looked for where the value is new. `place`: for the recipe's proof.
  [[nodiscard]] Decided decide_about_value(const LogRecipe::Root& root, const std::shared_ptr<SavedStorage>& saved,
                                           SavedStep& step, std::uint64_t place, bool may_be_made,
                                           const LogRecipe::SaveValue& save_value);

  // Runs the recipe and compares what it makes with the storage's bytes, which are there: Note [Proofs]. The calling
  // thread waits for the device.
  void prove(std::uint64_t proof, Recipe& recipe, const c10::Storage& bytes) noexcept;

  // Says that a backward pass begins on this thread, probably on `step`. Returns whether the first copies in should
  // start at once: under a plan, or where steps wait for copies, unless another of the thread's steps is in use, which
  // needs the window.
  [[nodiscard]] bool backward_begins(SavedStep& step);

  // What the user should know at the offloader's end, a sentence each. Under a budget nothing: recorded steps move
  // whatever they can, and the others what the budget asks for.
  [[nodiscard]] std::vector<std::string> warnings(const Stats& stats);

 private:
  [[nodiscard]] Found find_recipe(const at::Tensor& tensor, SavedStep& step, const MakeRecipe& make_recipe,
                                  const LogRecipe::SaveValue& save_value);
  [[nodiscard]] Found believed(std::unique_ptr<LogRecipe> recipe, std::uint64_t place,
                               const LogRecipe::SaveValue& save_value);
  [[nodiscard]] Decided decide_as_asked(ValueId value, OperationLog::Value::Asked asked,
                                        const std::shared_ptr<SavedStorage>& saved,
                                        const std::function<std::unique_ptr<LogRecipe>()>& find,
                                        const LogRecipe::SaveValue& save_value);
  [[nodiscard]] Decision decide_about(Candidate& candidate, const Found& found, const c10::Storage& storage,
                                      SavedStorage& saved, SavedStep& step, bool is_for_recipes);
  void look_for_proof(Found& found, std::uint64_t place);
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

  struct Proof {
    std::optional<bool> holds;  // whether the recipe has made the bytes that it is for
    int asked = 0;              // how often without an answer
  };
  Mutex proofs_mutex_;                                                             // held over nothing but the table
  std::unordered_map<std::uint64_t, Proof> proofs_ EBB_GUARDED_BY(proofs_mutex_);  // by Found::proof
};

}  // namespace ebb

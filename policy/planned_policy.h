#pragma once

#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "policy/budget.h"
#include "policy/minimum_size.h"
#include "policy/plan.h"
#include "policy/policy.h"
#include "policy/step_record.h"

namespace ebb {

// Decides by a plan for the step: what fits is kept, the rest moves or is recomputed, whatever costs least.
//
// Note [Recorded and planned steps]
// A step is known by its signature: the bytes and the operation of each storage, in order. (Not by whether it can be
// recomputed: that depends on what was decided about those it is computed from.) Under one that is new everything that
// can be is recomputed and the rest moves, which takes the least memory, and the runtime records when each storage is
// saved and needed. The second such step is planned from: the first one also loads kernels and makes host memory ready.
// A step that turns out not to be the expected one follows another plan if one has begun like it, else it goes on as a
// new one does, and the next steps are recorded until it has a plan. A few plans are kept side by side (training and
// evaluation, buckets of sequence length), the longest unused forgotten first.
//
// Threads: as Policy; `recorded_step` and `learn` too.
class PlannedPolicy final : public Policy {
 public:
  static constexpr std::size_t kMaxPlans = 16;
  static constexpr int kRecordedSteps = 2;  // of a signature, before it is planned
  static constexpr int kCorrections = 2;    // of a plan

  // `host_bytes`: the most that may be offloaded at once. Storages of fewer than `least_bytes` are kept, and are other
  // memory to the plan.
  PlannedPolicy(const Goal& goal, std::uint64_t host_bytes, const LinkRates& rates,
                std::uint64_t least_bytes = kDefaultMinimumBytes);

  void begin_step() override;
  void drop_step() override;
  [[nodiscard]] Decision decide(const Candidate& candidate) override;
  [[nodiscard]] bool needs_operation() const override { return true; }
  [[nodiscard]] bool needs_recompute() const override { return true; }
  [[nodiscard]] std::uint64_t least_bytes() const override { return least_bytes_; }

  // The number of the step that has begun, if it is to be recorded.
  // A step may have no end: one save that lives on, and forward passes without a backward. One that saves more than so
  // many storages is neither recorded nor planned.
  static constexpr std::size_t kMostStorages = std::size_t{1} << 15;
  [[nodiscard]] bool met_long_step() const { return met_long_step_; }

  [[nodiscard]] std::optional<std::uint64_t> recorded_step() const;

  // What was recorded of that step, its storages those that were asked about, in that order. One that is not a recorded
  // step's, or has another number of storages, is ignored: it was dropped, or is too old.
  void learn(std::uint64_t step, const StepRecord& record);

  // A step that followed `plan` took `step_ms`, and would have taken `end_ms` without what ebb added to it. If the
  // latter is not what was recorded, the plan is made again with all times in proportion; and if the step was far
  // slower than that explains, with copies as much slower as explain it. At most kCorrections times.
  void correct(const std::shared_ptr<const Plan>& plan, double end_ms, double step_ms);

  // The plan that the present step follows; null if it follows none. A storage's index in it is how many storages of at
  // least least_bytes(), and regions, the step had asked about before.
  [[nodiscard]] std::shared_ptr<const Plan> plan() const;

  // A storage of a step, as it is recognised.
  struct Key {
    std::uint64_t bytes = 0;
    std::string operation;
    bool operator==(const Key&) const = default;
  };
  using Signature = std::vector<Key>;

  // The plan that was followed or made last, with what it was made from; nullopt if there is none yet.
  struct Known {
    Signature signature;
    int records = 0;
    StepRecord record{};  // the last, corrected
    int corrections = 0;
    double copy_slowdown = 1;            // over the rates that were measured
    std::shared_ptr<const Plan> plan{};  // once there are enough records
  };
  [[nodiscard]] std::optional<Known> last_plan() const;
  [[nodiscard]] const Goal& goal() const { return goal_; }

  // What its plan is made with.
  [[nodiscard]] LinkRates rates(const Known& known) const;

 private:
  void make_plan_of(Known& known) const;
  [[nodiscard]] double slowdown_that_explains(const Known& known, double step_ms) const;
  [[nodiscard]] bool follows(const Known& known, std::size_t position) const;
  [[nodiscard]] bool any_plan() const;
  [[nodiscard]] bool has_plan(const Signature& signature) const;
  [[nodiscard]] bool choose_plan();
  void remember_signature();
  void forget_step();

  const Goal goal_;
  const std::uint64_t host_bytes_;
  const LinkRates rates_;
  const std::uint64_t least_bytes_;

  std::list<Known> known_;                       // the last used first
  std::map<std::uint64_t, Signature> recorded_;  // steps whose records are yet to come
  std::uint64_t step_ = 0;
  std::uint64_t learned_ = 0;   // the last step of which a record has come
  Signature seen_;              // of the step that has begun
  Signature wanted_;            // of the last step that strayed
  int patience_ = 0;            // how many more steps may be recorded for it
  Known* following_ = nullptr;  // the plan of the step that has begun, once it has asked
  bool recording_ = false;      // it is recorded, and follows no plan
  bool strayed_ = false;        // it has left all plans
  bool too_long_ = false;       // it, or the one before, has saved more than kMostStorages
  bool met_long_step_ = false;  // ever
};

}  // namespace ebb

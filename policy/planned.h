#pragma once

#include <cstdint>
#include <list>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "policy/minimum_size.h"
#include "policy/plan.h"
#include "policy/policy.h"
#include "policy/step_record.h"

namespace ebb {

// Decides by a plan for the step: what fits is kept, the rest moves or is recomputed, whatever costs least.
//
// Note [Recorded and planned steps]
// A step is known by its signature: the bytes, the operation and the kind of recipe of each storage, in order. Under
// one that is new everything that can be is recomputed and the rest moves, which takes the least memory, and the
// runtime records when each storage is saved and needed. The second such step is planned from: the first one also loads
// kernels and makes host memory ready. A step that turns out not to be the expected one follows another plan if one has
// begun like it, else it goes on as a new one does, and the next steps are recorded until it has a plan. A few plans
// are kept side by side (training and evaluation, buckets of sequence length), the longest unused forgotten first.
//
// Threads: as Policy; `recorded_step` and `learn` too.
class Planned final : public Policy {
 public:
  static constexpr std::size_t kMaxPlans = 16;
  static constexpr int kRecordedSteps = 2;  // of a signature, before it is planned

  // Storages of fewer bytes are kept, and are other memory to the plan.
  Planned(const Limits& limits, const LinkRates& rates, std::uint64_t least_bytes = kDefaultMinimumBytes);

  void begin_step() override;
  void drop_step() override;
  [[nodiscard]] Decision decide(const Candidate& candidate) override;
  [[nodiscard]] bool needs_operation() const override { return true; }
  [[nodiscard]] bool needs_recompute() const override { return true; }
  [[nodiscard]] std::uint64_t least_bytes() const override { return least_bytes_; }

  // The number of the step that has begun, if it is to be recorded.
  [[nodiscard]] std::optional<std::uint64_t> recorded_step() const;

  // What was recorded of that step, its storages those that were asked about, in that order. One that is not a recorded
  // step's, or has another number of storages, is ignored: it was dropped, or is too old.
  void learn(std::uint64_t step, const StepRecord& record);

  // The plan that the present step follows; null if it follows none.
  [[nodiscard]] const Plan* plan() const;

 private:
  struct Key {
    std::uint64_t bytes = 0;
    std::string operation;
    Recompute recompute = Recompute::kNo;
    bool operator==(const Key&) const = default;
  };
  using Signature = std::vector<Key>;

  struct Known {
    Signature signature;
    int records = 0;
    Plan plan;  // once there are enough
    [[nodiscard]] bool planned() const { return records >= kRecordedSteps; }
  };

  [[nodiscard]] bool follows(const Known& known, std::size_t position) const;
  [[nodiscard]] bool any_plan() const;
  [[nodiscard]] bool has_plan(const Signature& signature) const;
  [[nodiscard]] bool choose_plan();
  void remember_signature();
  void forget_step();

  const Limits limits_;
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
};

}  // namespace ebb

#pragma once

#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "policy/budget.h"
#include "policy/plan.h"
#include "policy/policies.h"
#include "policy/policy.h"
#include "policy/step_record.h"

namespace ebb {

// Decides about a step's storages by a plan for the step: storages that fit are kept, and each of the others is
// offloaded or recomputed, whichever costs less. The planner says which steps are to be recorded, makes the plans from
// their records, and makes a plan again where a step that followed the plan took something else.
//
// Note [Recorded and planned steps]
// A step is known by its signature: the bytes and the operation of each storage, in order. (The signature leaves out
// whether a storage can be recomputed, because that depends on the decisions about the recipe's inputs.) In a step with
// a new signature every storage that can be recomputed is recomputed and the rest is offloaded, which takes the least
// memory, and the runtime records when each storage is saved and needed. The plan is made from the second such step,
// because the first step also loads kernels and makes host memory ready; with managed storages, from the third, because
// the optimizer makes its states in the first. A step that strays from its plan follows another plan if the step has
// begun like that plan. Otherwise the step goes on as a step with a new signature does, and the next steps are recorded
// until the strayed step has a plan. A few plans are kept side by side (training and evaluation); the plan that was
// unused longest is forgotten first.
//
// Steps of one structure run the same operations on other sizes. Once two of them have been recorded, the first step of
// all not counted, a step of another size gets a plan of its own with its first storage, whose bytes are the size, from
// what the two tell (Note [Steps of one structure]). What is found out about a plan's times and memory holds for all of
// its structure. Sizes that hardly differ tell nothing of others. A step of such a size follows the plan of a recorded
// one that is a little larger, and a third record of such sizes is planned at once.
//
// After a step has strayed, the next steps are recorded to find it again, but for those that the first storage tells to
// be another step with a plan.
//
// Where all fits, recipes need not be known. A step rests if all plans that it may be going to follow are of one
// structure and keep everything, and a step of that structure was measured and kept to the budget. At rest the saves of
// autograd alone are compared with the plan, without what recipes begin from. A step that strays then tells too little
// to be looked for, so the next steps do not rest. Where there are no plans, steps that are left alone rest, too.
//
// Other steps may never be alike. So under a budget in bytes, after a recorded step that would have fitted whole, a
// step without a plan is left alone: a storage is kept as long as all storages of the step so far fit beside the most
// other memory that was recorded, scaled up where the step saves more than any recorded step. A step that does not fit
// whole moves the rest, and the next step is recorded.
//
// Threads: no two members are called at once.
class StepPlanner {
 public:
  static constexpr std::size_t kMaxPlans = 32;
  static constexpr int kRecordedSteps = 2;      // how many steps of a signature are recorded before a plan is made
  static constexpr int kMostRecordedSteps = 8;  // if all records before are preliminary
  static constexpr int kCorrections = 2;        // how often a plan may be made again for its times
  static constexpr int kMemoryCorrections = 4;  // and for taking more than its budget

  // `host_bytes`: the most bytes that may be offloaded at once, unless limit_host() tells of fewer. Storages of fewer
  // than `least_bytes` are kept, and count as other memory in the plan.
  StepPlanner(const Goal& goal, std::uint64_t host_bytes, const LinkRates& rates,
              std::uint64_t least_bytes = kDefaultMinimumBytes);

  // As Policy's.
  void begin_step();
  void drop_step();
  [[nodiscard]] std::uint64_t least_bytes() const { return least_bytes_; }

  // What becomes of a storage, and the plan that the step now follows; null if the step follows none. The storage's
  // index in the plan is the number of storages of at least least_bytes() that the step had asked about before.
  // Candidate::operation and Candidate::recompute are to be filled in.
  struct Answer {
    Decision decision = Decision::kKeep;
    std::shared_ptr<const Plan> plan;
    std::uint64_t structure = 0;  // the plan's; steps of another structure have another number
    std::uint64_t revision = 0;   // another where plans were made again for another reason than correct()
  };
  [[nodiscard]] Answer decide(const Candidate& candidate);

  // Whether the step rests, and so keeps the storage. To be called for each storage that autograd saves, and decide()
  // only where the result is false, which the result then is for the rest of the step.
  [[nodiscard]] bool rests(const Candidate& candidate);

  // Notes that autograd saves what recipes have begun from, a candidate of the present step that was decided about.
  void saved_later(std::uint64_t ordinal);

  // Notes that no recipes are looked for in the step that has begun: its record would say too little.
  void looks_for_no_recipes();

  // The operation of a storage that autograd does not save: what recipes begin from.
  static constexpr std::string_view kNotSaved = "(not saved by autograd)";

  // The most storages of a step that is recorded or planned. A step may have no end: while one save lives, all forward
  // passes without a backward belong to the save's step.
  static constexpr std::size_t kMostStorages = std::size_t{1} << 15;

  // Whether any step so far has saved more than kMostStorages.
  [[nodiscard]] bool met_long_step() const { return met_long_step_; }

  // The number of the step that has begun, if that step is to be recorded.
  [[nodiscard]] std::optional<std::uint64_t> recorded_step() const;

  // Takes the record of a step; the record's storages are the candidates that decide() was asked about, in that order.
  // A record of a step that is not being recorded, because the step was dropped or is too old, or a record with another
  // number of storages, is ignored.
  void learn(std::uint64_t step, const StepRecord& record);

  // Forgets all plans and records, and what limit_host() has told. The present step goes on as one with a new
  // signature.
  void forget_plans();

  // Notes that there was no room for more than so many offloaded bytes, managed tensors' homes not counted. From the
  // next step on, plans that would offload more are made again within the lower limit, but for those that would not
  // fit.
  void limit_host(std::uint64_t bytes);

  // Notes what a step which followed `plan` took. `end_ms`: what the step would have taken without the waits and
  // recipes that ebb added. If `end_ms` differs from the record's, the plan is made again with all recorded times
  // scaled in proportion. If the step was still far slower than predicted, the plan is made again with copies slower by
  // the factor that explains the difference. If the peak was over the budget, the plan is made again with as much more
  // other memory as the prediction was too low: an allocator gives some tensors more than they ask for; not where the
  // new plan would not fit. A plan is made again at most kCorrections times for its times, and kMemoryCorrections times
  // for its memory. Returns whether that was done.
  bool correct(const std::shared_ptr<const Plan>& plan, double end_ms, const StepCost& cost);

  // The facts by which a storage of a step is recognised.
  struct Key {
    std::uint64_t bytes = 0;
    std::string operation;
    bool operator==(const Key&) const = default;
  };
  using Signature = std::vector<Key>;

  // What is found out about a structure's plans.
  struct Correction {
    int of_times = 0;  // how often
    int of_memory = 0;
    bool is_checked = false;      // a step that followed a plan was measured, and kept to the budget
    double slower = 1;            // the factor for all times
    std::int64_t more_bytes = 0;  // of other memory
    double copy_slowdown = 1;     // the factor by which copies are slower than measured
  };

  // A signature, with the last record of a step that has it, and its plan.
  struct Known {
    Signature signature;
    std::uint64_t structure = 0;
    std::vector<std::uint64_t> saved_later{};  // places in the signature, as saved_later() has told
    int records = 0;                           // 0: the record is made from those of two other steps of the structure
    bool is_warm = false;                      // the record is not that of the first recorded step
    StepRecord record{};                       // of the last recorded step, with times as corrected
    Correction correction{};                   // of the record, and of the structure's others
    std::shared_ptr<const Plan> plan{};        // null until there are enough records
  };

  // The plan that was followed or made last, with what the plan was made from; null if there is no plan yet.
  [[nodiscard]] const Known* last_plan() const;

  // The rates that the plan of `known` is made with.
  [[nodiscard]] LinkRates rates(const Known& known) const;

 private:
  void make_plan_of(Known& known, const Known* larger = nullptr) const;
  [[nodiscard]] const Known* a_little_larger(const Known& known) const;
  [[nodiscard]] int records_near(const Known& known) const;
  [[nodiscard]] const Known* unlike_in_size(const Known& known) const;
  [[nodiscard]] Known* make_resized();
  void forget_oldest();
  [[nodiscard]] std::uint64_t structure_of(const Signature& signature);
  void put_corrected(Known& known, Known corrected);
  void keep_to_host_limit();
  [[nodiscard]] bool correct_times(Known& known, double end_ms, double step_ms) const;
  [[nodiscard]] double slowdown_that_explains(const Known& known, double step_ms) const;
  [[nodiscard]] Decision decision_about(const Candidate& candidate);
  [[nodiscard]] bool choose_plan();
  [[nodiscard]] bool takes_more_than_planned(std::size_t place, std::uint64_t bytes);
  [[nodiscard]] bool fits_whole(std::uint64_t saved_bytes) const;
  [[nodiscard]] Known* plan_at_rest(const Key& first);
  [[nodiscard]] bool goes_on_at_rest(const Key& key);
  void stray_from_rest();
  void stop_recording();

  const Goal goal_;
  const std::uint64_t first_host_bytes_;
  std::uint64_t host_bytes_ = first_host_bytes_;
  bool host_limit_is_new_ = false;
  const LinkRates rates_;
  const std::uint64_t least_bytes_;

  // The step that has begun.
  struct Step {
    std::shared_ptr<Signature> seen = std::make_shared<Signature>();
    Known* following = nullptr;   // once the step has asked
    bool may_be_smaller = false;  // than what the plan is for
    bool strayed = false;         // like no plan
    bool moves = false;           // does not keep all of its storages
    std::uint64_t kept = 0;       // bytes
    std::int64_t unplanned = 0;   // the bytes that storages have more than the plan's
    bool has_begun = false;       // rests() was asked
    bool rests = false;
    bool has_recipes = true;       // `seen` has what recipes begin from
    std::size_t next_at_rest = 0;  // place in the signature
    std::int64_t saved_later = 0;  // at rest, how many storages that recipes begin from autograd has saved
  };

  std::list<Known> known_;  // the last used comes first
  std::uint64_t structures_ = 0;
  std::uint64_t revision_ = 0;
  Step now_;
  std::uint64_t step_ = 0;
  bool recording_ = false;  // the step that has begun is recorded, and follows no plan
  std::map<std::uint64_t, std::shared_ptr<const Signature>> recorded_;  // steps whose records are yet to come
  Signature wanted_;                                                    // of the last step that strayed
  int patience_ = 0;  // how many more steps may be recorded to find `wanted_`
  int restless_ = 0;  // how many more steps do not rest

  // Of all recorded steps: the most bytes that a step saved, and the most other memory. Zero before the first record.
  std::uint64_t most_saved_ = 0;
  std::uint64_t most_other_ = 0;
  bool leaves_alone_ = false;   // steps without a plan are left alone, and not recorded
  bool too_long_ = false;       // the step that has begun, or the one before, has saved more than kMostStorages
  bool met_long_step_ = false;  // any step so far has saved more than kMostStorages
};

}  // namespace ebb

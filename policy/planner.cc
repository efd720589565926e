#include "policy/planner.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "policy/policy.h"
#include "policy/predict.h"

namespace ebb {
namespace {

using Index = std::uint32_t;

// How much the search may cost: the number of predictions times the number of storages.
constexpr std::size_t kTries = 400'000;

// Recipes whose costs per byte differ by at most this factor count as equally cheap, because measured times of equal
// operations differ.
constexpr double kAlike = 1.1;

// A search for a number of storages is exact to this part of all storages.
constexpr std::size_t kGrains = 128;

constexpr std::array kAll{Decision::kKeep, Decision::kOffload, Decision::kRecompute};

std::uint64_t over(std::uint64_t bytes, std::uint64_t limit) { return bytes > limit ? bytes - limit : 0; }

class Search {
 public:
  Search(const StepRecord& record, const Limits& limits, const LinkRates& rates, double effort)
      : record_(record),
        limits_(limits),
        predictor_(record, limits.device_bytes, rates),
        most_tries_(static_cast<std::size_t>(effort * kTries)) {
    sort_by_cost();
    find_alike();
  }

  // `from`: decisions to begin from, too.
  Plan run(const std::vector<Decision>* from = nullptr) {
    try_plan(std::vector<Decision>(record_.storages.size(), Decision::kKeep));
    if (!best_.fits) {
      if (from == nullptr || std::get<0>(try_plan(possible(*from))) > 0) {
        choose_how_many_to_recompute();
      }
      improve();
    }
    const std::vector<bool> nowhere = not_held(record_, best_.decisions);
    for (std::size_t i = 0; i < nowhere.size(); ++i) {
      best_.decisions[i] = nowhere[i] ? Decision::kKeep : best_.decisions[i];
    }
    best_.device_bytes = limits_.device_bytes;
    best_.schedule = make_schedule(record_, predictor_.events(), best_.decisions, limits_.device_bytes);
    return std::move(best_);
  }

 private:
  using Change = std::pair<Index, Decision>;
  using Score = std::tuple<std::uint64_t, double, std::uint64_t>;  // smaller is better

  // Sorts the storages that can be recomputed by cost per byte, and those of about equal cost by need, the first needed
  // first.
  void sort_by_cost() {
    std::vector<bool> seen(record_.storages.size());
    for (Index i = 0; i < record_.storages.size(); ++i) {
      if (record_.storages[i].recompute != Recompute::kNo && !seen[i]) {
        cheapest_.push_back(i);
        for_each_made_with(record_, i, [&seen](Index made) { seen[made] = true; });
      }
    }
    std::ranges::sort(cheapest_, {}, [&](Index i) { return std::pair(ms_per_byte(i), i); });
    for (auto first = cheapest_.begin(); first != cheapest_.end();) {
      const double most = kAlike * ms_per_byte(*first);
      const auto last = std::find_if(first, cheapest_.end(), [&](Index i) { return ms_per_byte(i) > most; });
      std::sort(first, last, [&](Index a, Index b) { return needed(a) < needed(b); });
      first = last;
    }
  }

  // Storages of the same size that are made in the same way from what was saved as far before them: those at one place
  // of a block that is repeated.
  void find_alike() {
    std::map<std::vector<std::uint64_t>, std::vector<Index>> places;
    for (Index i = 0; i < record_.storages.size(); ++i) {
      const StorageRecord& storage = record_.storages[i];
      std::vector<std::uint64_t> place{storage.bytes, static_cast<std::uint64_t>(storage.recompute),
                                       static_cast<std::uint64_t>(storage.is_for_recipes)};
      for (const Index input : storage.inputs) {
        place.push_back(i - input);
      }
      places[place].push_back(i);
    }
    for (auto& [place, storages] : places) {
      if (storages.size() > 1 && place.front() > 0) {
        alike_.push_back(std::move(storages));
      }
    }
  }

  [[nodiscard]] double ms_per_byte(Index i) const {
    std::uint64_t bytes = 0;
    for_each_made_with(record_, i, [&](Index made) { bytes += record_.storages[made].bytes; });
    return record_.storages[i].recompute_ms / static_cast<double>(std::max<std::uint64_t>(bytes, 1));
  }
  [[nodiscard]] std::pair<double, Index> needed(Index i) const { return {record_.storages[i].needed_ms, i}; }

  [[nodiscard]] Score score(const Prediction& prediction) const {
    if (prediction.offloaded_bytes > limits_.host_bytes) {  // the host cannot hold the offloaded bytes
      return {kUnlimited, prediction.step_ms, prediction.offloaded_bytes};
    }
    return {over(prediction.peak_bytes, limits_.device_bytes), prediction.step_ms, prediction.offloaded_bytes};
  }

  // Predicts the step, remembers the best decisions so far, and returns the score.
  Score try_plan(const std::vector<Decision>& decisions) {
    const Prediction prediction = predictor_.predict(decisions);
    tried_ += decisions.size();
    const Score found = score(prediction);
    if (!best_score_ || found < *best_score_) {
      best_.decisions = decisions;
      best_.predicted = prediction;
      best_.fits = std::get<0>(found) == 0;
      best_score_ = found;
    }
    return found;
  }

  // Decisions that recompute the cheapest `count` storages, except those whose recipes would run too deep.
  [[nodiscard]] std::vector<Decision> recomputing(std::size_t count) const {
    std::vector<Decision> decisions(record_.storages.size(), Decision::kKeep);
    for (std::size_t k = 0; k < count; ++k) {
      for_each_made_with(record_, cheapest_[k], [&](Index made) { decisions[made] = Decision::kRecompute; });
    }
    limit_depth(decisions);
    return decisions;
  }

  // The decisions of a step of another size, whose recipes may be others.
  [[nodiscard]] std::vector<Decision> possible(std::vector<Decision> decisions) const {
    for (Index i = 0; i < decisions.size(); ++i) {
      if (decisions[i] == Decision::kRecompute && record_.storages[i].recompute == Recompute::kNo) {
        decisions[i] = Decision::kOffload;
      }
    }
    limit_depth(decisions);
    return decisions;
  }

  void limit_depth(std::vector<Decision>& decisions) const {
    std::vector<int> depth(decisions.size());
    for (Index i = 0; i < decisions.size(); ++i) {
      if (decisions[i] == Decision::kRecompute) {
        for (const Index input : record_.storages[i].inputs) {
          depth[i] = std::max(depth[i], depth[input]);
        }
        if (++depth[i] > kMaxRecipeDepth) {
          decisions[i] = Decision::kKeep;
          depth[i] = 0;
        }
      }
    }
  }

  [[nodiscard]] bool may_offload(const std::vector<Decision>& decisions, Index i) const {
    const StorageRecord& storage = record_.storages[i];
    return decisions[i] == Decision::kKeep && storage.bytes > 0;
  }

  // `decisions`, with the first `count` storages that may be offloaded offloaded, as far as the host has room.
  [[nodiscard]] std::vector<Decision> offloading(std::vector<Decision> decisions, std::size_t count) const {
    std::uint64_t on_host = 0;
    for (Index i = 0; i < decisions.size() && count > 0; ++i) {
      const std::uint64_t bytes = record_.storages[i].bytes;
      if (may_offload(decisions, i) && over(on_host + bytes, limits_.host_bytes) == 0) {
        decisions[i] = Decision::kOffload;
        on_host += bytes;
        --count;
      }
    }
    return decisions;
  }

  // How many of the first storages that may be offloaded have `bytes` in all. Fewer cannot lower the peak by `bytes`,
  // because an offloaded byte lowers the peak by at most one.
  [[nodiscard]] std::size_t at_least(const std::vector<Decision>& decisions, std::uint64_t bytes) const {
    std::size_t count = 0;
    for (Index i = 0; i < decisions.size() && bytes > 0; ++i) {
      if (may_offload(decisions, i)) {
        bytes -= std::min(bytes, record_.storages[i].bytes);
        ++count;
      }
    }
    return count;
  }

  // The best score found with `count` storages recomputed: the score of the fewest offloaded that fit, if any number
  // fits.
  Score with_recomputed(std::size_t count) {
    const auto [found, is_new] = with_recomputed_.try_emplace(count);
    if (is_new) {
      found->second = try_recomputing(count);
    }
    return found->second;
  }

  Score try_recomputing(std::size_t count) {
    const std::vector<Decision> decisions = recomputing(count);
    Score best = try_plan(decisions);
    const bool too_slow =
        best_.fits && std::get<1>(best) > std::get<1>(*best_score_);  // offloading would only add waits
    if (std::get<0>(best) == 0 || too_slow) {
      return best;
    }
    const auto fits = [&](std::size_t first) {
      const Score found = try_plan(offloading(decisions, first));
      best = std::min(best, found);
      return std::get<0>(found) == 0;
    };
    std::size_t too_few = at_least(decisions, std::get<0>(best));
    std::size_t enough = at_least(decisions, kUnlimited);
    if (fits(too_few) || too_few == enough || !fits(enough)) {
      return best;
    }
    while (too_few + grain_ < enough) {
      const std::size_t middle = too_few + (enough - too_few) / 2;
      (fits(middle) ? enough : too_few) = middle;
    }
    return best;
  }

  void choose_how_many_to_recompute() {
    constexpr std::size_t kParts = 6;
    std::size_t from = 0;
    std::size_t to = cheapest_.size();
    while (true) {
      const std::size_t step = std::max<std::size_t>((to - from) / kParts, 1);
      std::size_t best = from;
      Score best_score = with_recomputed(from);
      for (std::size_t count = from + step; count < to + step; count += step) {
        const std::size_t at = std::min(count, to);
        if (const Score found = with_recomputed(at); found < best_score) {
          best_score = found;
          best = at;
        }
      }
      if (step <= grain_ || tried_ > most_tries_) {
        return;
      }
      from = std::max(from + step, best) - step;
      to = std::min(to, best + step);
    }
  }

  // Where every block passes the limit, no change of a single storage helps, and where one does, changes of many at
  // once pass by plans that are faster. So a plan that does not fit is improved in both ways.
  void improve() {
    if (best_.fits) {
      change_decisions();
      return;
    }
    const Plan begin = best_;
    const std::optional<Score> begin_score = best_score_;
    const std::size_t begin_tried = tried_;
    while (tried_ <= (begin_tried + most_tries_) / 2 && change_alike()) {
    }
    change_decisions();
    Plan other = std::exchange(best_, begin);
    const std::optional<Score> other_score = std::exchange(best_score_, begin_score);
    tried_ = begin_tried;
    change_decisions();
    if (*other_score < *best_score_) {
      best_ = std::move(other);
    }
  }

  // Changes the decisions about all that one run makes, and single decisions, then two together, and so on; after a
  // change that helps, single decisions again. Where the tries do not allow for all single changes, those about what is
  // alike come first.
  void change_decisions() {
    const auto most = static_cast<Index>(record_.storages.size());
    std::vector<Change> changes;
    if (tried_ + 2 * std::size_t{most} * most > most_tries_) {
      change_alike();
    }
    for (Index together = 1; together <= most && tried_ <= most_tries_;) {
      bool better = together == 1 && change_runs();
      better = change_together(together, most, changes) || better;
      better = better || (together == 1 && change_alike());
      together = better ? 1 : together + 1;
    }
  }

  // Changes the decisions about all storages that are alike, and about the earlier or the later half of them: where
  // every block passes the limit, a change of one block does not help.
  bool change_alike() {
    bool better = false;
    for (const std::vector<Index>& storages : alike_) {
      const auto middle = storages.begin() + static_cast<std::ptrdiff_t>(storages.size() / 2);
      for (const auto& [from, to] : {std::pair(storages.begin(), storages.end()), std::pair(storages.begin(), middle),
                                     std::pair(middle, storages.end())}) {
        for (const Decision decision : kAll) {
          std::vector<Change> changes;
          for (auto i = from; i != to; ++i) {
            if (is_change(*i, decision)) {
              changes.emplace_back(*i, decision);
            }
          }
          better = (!changes.empty() && change(changes)) || better;
        }
      }
    }
    return better;
  }

  bool change_runs() {
    bool better = false;
    for (const Index i : cheapest_) {
      for (const Decision decision : kAll) {
        std::vector<Change> changes;
        for_each_made_with(record_, i, [&](Index made) {
          if (is_change(made, decision)) {
            changes.emplace_back(made, decision);
          }
        });
        better = (changes.size() > 1 && change(changes)) || better;
      }
    }
    return better;
  }

  // Tries `changes` together with `count` more changes to the first `below` storages, until a try is better than the
  // best so far; single changes are all tried. Returns whether any was better.
  bool change_together(Index count, Index below, std::vector<Change>& changes) {
    if (count == 0) {
      return change(changes);
    }
    const bool single = count == 1 && changes.empty();
    bool better = false;
    for (Index i = 0; i < below && tried_ <= most_tries_; ++i) {
      for (const Decision decision : kAll) {
        if (is_change(i, decision)) {
          changes.emplace_back(i, decision);
          better = change_together(count - 1, i, changes) || better;
          changes.pop_back();
          if (better && !single) {
            return true;
          }
        }
      }
    }
    return better;
  }

  [[nodiscard]] bool is_change(Index i, Decision decision) const {
    const StorageRecord& storage = record_.storages[i];
    return best_.decisions[i] != decision && (decision != Decision::kRecompute || storage.recompute != Recompute::kNo);
  }

  // Tries the best decisions with `changes`. Returns whether the result is better than the best so far.
  bool change(const std::vector<Change>& changes) {
    if (tried_ > most_tries_) {
      return false;
    }
    std::vector<Decision> changed = best_.decisions;
    for (const auto& [i, decision] : changes) {
      changed[i] = decision;
    }
    limit_depth(changed);
    const Score before = *best_score_;
    return try_plan(changed) < before;
  }

  const StepRecord& record_;
  const Limits limits_;
  const Predictor predictor_;
  const std::size_t most_tries_;
  const std::size_t grain_ = std::max<std::size_t>(record_.storages.size() / kGrains, 1);
  std::vector<Index> cheapest_;  // what can be recomputed, one storage for a run, as sort_by_cost() leaves them
  std::vector<std::vector<Index>> alike_;
  std::map<std::size_t, Score> with_recomputed_;
  std::size_t tried_ = 0;
  Plan best_;
  std::optional<Score> best_score_;
};

}  // namespace

Plan make_plan(const StepRecord& record, const Limits& limits, const LinkRates& rates, double effort,
               const std::vector<Decision>* near) {
  if (near != nullptr) {
    constexpr double kPart = 1.0 / 4;
    if (Plan plan = Search(record, limits, rates, kPart * effort).run(near); plan.fits) {
      return plan;
    }
  }
  Plan plan = Search(record, limits, rates, effort).run();
  if (plan.fits || limits.device_bytes == 0) {
    return plan;
  }
  const Limits none{.device_bytes = 0, .host_bytes = limits.host_bytes};
  const Plan least = Search(record, none, rates, effort).run();
  Plan from_least = Search(record, limits, rates, effort).run(&least.decisions);
  const bool is_nearer = from_least.fits || from_least.predicted.peak_bytes < plan.predicted.peak_bytes;
  return is_nearer && from_least.predicted.offloaded_bytes <= limits.host_bytes ? from_least : plan;
}

// A limit of 0 makes compute wait for every copy, and no plan takes less memory. A faster plan with the same peak is
// better.
Plan make_least_plan(const StepRecord& record, std::uint64_t host_bytes, const LinkRates& rates) {
  Plan least = make_plan(record, {.device_bytes = 0, .host_bytes = host_bytes}, rates);
  Plan plan = make_plan(record, {.device_bytes = least.predicted.peak_bytes, .host_bytes = host_bytes}, rates);
  least.fits = true;
  return plan.fits ? plan : least;
}

}  // namespace ebb

#include "test/random/check.h"

#include <algorithm>
#include <exception>
#include <optional>
#include <utility>

#include "test/random/device_bytes.h"
#include "test/random/interpreter.h"
#include "test/random/proof.h"
#include "test/random/record.h"
#include "test/random/slow_cpu.h"

namespace ebb::graphs {
namespace {

Tally tally_of(const Stats& stats) {
  Tally tally;
  tally.saved = stats.saved.tensors;
  tally.offloaded = stats.offloaded.tensors;
  tally.fetched = stats.fetched.tensors;
  tally.reused = stats.reused.tensors;
  tally.recomputed = stats.recomputed.tensors;
  tally.evicted = stats.evicted.tensors;
  for (const Count& kept : stats.kept) {
    tally.kept += kept.tensors;
  }
  tally.graphs_moved = tally.offloaded > 0 ? 1 : 0;
  return tally;
}

std::uint64_t errors(const Outcome& outcome) {
  std::uint64_t count = 0;
  for (const std::vector<Record>& records : outcome) {
    count += std::ranges::count_if(records, &Record::is_error);
  }
  return count;
}

// What a run under a setting did wrong.
struct Found {
  std::optional<Difference> difference;  // from what plain autograd computed
  std::optional<std::string> other;      // bytes that stay, or an error of the offloader's own
};

// One pass after another over one rig, until one is wrong.
Found run_passes(const Case& tested, const Ground& ground, Rig& rig, const Outcome& expected, bool lets_go) {
  for (int pass = 0; pass < tested.setting.passes; ++pass) {
    const std::string prefix = "pass " + std::to_string(pass) + ", ";
    if (auto different = first_difference(expected, run(tested.program, ground))) {
      different->text.insert(0, prefix);
      return {.difference = std::move(different), .other = {}};
    }
    if (const auto left = lets_go ? rig.leftover() : std::nullopt) {
      return {.difference = {}, .other = prefix + *left};
    }
  }
  return {};
}

// Note [Errors beside the CPU's thread]
// In a graph with nodes of a GPU and of the CPU, two threads of the engine run them side by side. If one node fails,
// what the other thread has accumulated by then is a matter of luck, with plain autograd too.
bool may_race_with_an_error(const Case& tested, c10::Device device, const Outcome& expected) {
  const auto is_on_cpu = [](const Instruction& line) { return line.operation->name == "through_the_cpu"; };
  return device.is_cuda() && errors(expected) > 0 &&
         std::ranges::any_of(tested.program.threads,
                             [&](const Thread& lines) { return std::ranges::any_of(lines, is_on_cpu); });
}

// Note [Recipes and writes]
// A recipe computes from what its operation has saved. Where that has been written to, backward gets LibTorch's error
// for it even if plain autograd would not have looked there: the graph covers other parts only, or has been freed.
// Where its memory was taken away, backward gets an error of ebb's. It has to be shown that there was such a write, or
// that such memory was taken: Note [Proof of a write].
//
// A backward that fails leaves the gradients that it has accumulated by then. A recipe may refuse sooner than the node
// that plain autograd's error comes from: the same error, or another version's, and fewer gradients. Plain autograd's
// own error is the proof.
bool is_behind_a_refusal(const Outcome& expected, const Difference& found) {
  constexpr const char* kRefusal = "has been modified by an inplace operation";
  const bool refuses = found.error.find(kRefusal) != std::string::npos;
  return (found.error.empty() || refuses) && std::ranges::any_of(expected[found.thread], [&](const Record& record) {
           return record.is_error() && record.text().find(kRefusal) != std::string::npos &&
                  (!refuses || record.value() == found.value);
         });
}

// The same, but no memory is taken from a tensor and given back; nullopt if none was.
std::optional<Case> without_refills(Case tested) {
  bool found = false;
  for (Thread& lines : tested.program.threads) {
    for (Instruction& line : lines) {
      if (line.operation->name == "refill") {
        line.operation = &operation("contiguous");
        found = true;
      }
    }
  }
  return found ? std::optional(std::move(tested)) : std::nullopt;
}

// What plain autograd computes may not depend on the memory that was taken, so that no look at plain autograd proves
// anything (`cumprod` of one element). The other proof: without the taking, the same pass is not refused.
bool refills_are_refused(const Case& tested, const Difference& found, c10::Device device) {
  const std::optional<Case> without = without_refills(tested);
  if (!without) {
    return false;
  }
  const Outcome expected = run(without->program, Ground{device, {}, {}});
  Rig rig(without->setting, device, {});
  for (int pass = 0; pass < without->setting.passes; ++pass) {
    const auto different =
        first_difference(expected, run(without->program, Ground{device, rig.offloaders(), without->setting.managed}));
    if (different && different->error == found.error) {
      return false;
    }
  }
  return true;
}

bool is_a_recipes_refusal(const Case& tested, const Outcome& expected, const Difference& found, c10::Device device) {
  const Choice policy = tested.setting.policy;
  const auto says = [&found](const char* text) { return found.error.find(text) != std::string::npos; };
  if (policy != Choice::kRecompute && policy != Choice::kAnything && policy != Choice::kPlan) {
    return false;
  }
  return is_behind_a_refusal(expected, found) ||
         (says("has been modified by an inplace operation") &&
          plain_refuses_too(tested.program, expected, found, device)) ||
         (says("has been resized or replaced since") &&
          (saved_memory_was_taken(tested.program, expected, found, device) ||
           refills_are_refused(tested, found, device)));
}

// Note [The name of a kernel that is not there]
// Operations that complex halves do not have say so under the name of a kernel, and which one depends on whether two
// tensors share their memory: at::equal looks for NaN only in views of one storage.
bool is_of_missing_kernels(const std::string& difference) {
  const std::string missing = "not implemented for 'ComplexHalf'";
  const auto first = difference.find(missing);
  return first != std::string::npos && difference.find(missing, first + 1) != std::string::npos;
}

// Where a function has returned what it saved, docs/correctness.md does not promise whether a gradient requires one.
bool is_whether_a_gradient_requires_one(const Program& program, std::string difference) {
  const auto returns_saves = [](const Instruction& line) { return line.operation->kind == Kind::kReturn; };
  if (std::ranges::none_of(program.threads,
                           [&](const Thread& lines) { return std::ranges::any_of(lines, returns_saves); })) {
    return false;
  }
  const std::string requires_grad = " requires_grad";
  const std::string instead = " instead of ";
  const auto at = difference.find(requires_grad);
  if (difference.find("gradient of ") == std::string::npos || at == std::string::npos) {
    return false;
  }
  difference.erase(at, requires_grad.size());
  const auto middle = difference.find(instead);
  const std::string expected = middle == std::string::npos ? "" : difference.substr(middle + instead.size());
  return !expected.empty() && difference.substr(0, middle).ends_with(expected);
}

bool plain_is_steady(const Program& program, const Ground& plain, const Outcome& expected) {
  constexpr int kRuns = 20;
  for (int i = 0; i < kRuns; ++i) {
    const SlowCpu slow(i % 2 == 1);  // Note [Sums of two threads]
    if (first_difference(expected, run(program, plain))) {
      return false;
    }
  }
  return true;
}

}  // namespace

Tally& Tally::operator+=(const Tally& other) {
  saved += other.saved;
  offloaded += other.offloaded;
  fetched += other.fetched;
  reused += other.reused;
  kept += other.kept;
  graphs_moved += other.graphs_moved;
  errors += other.errors;
  cycles += other.cycles;
  unsteady += other.unsteady;
  refusals += other.refusals;
  recomputed += other.recomputed;
  evicted += other.evicted;
  return *this;
}

Verdict check(const Case& tested, c10::Device device, const WrapTier& wrap) {
  const std::uint64_t at_first = settled_device_bytes(device);
  const Outcome expected = run(tested.program, Ground{device, {}, {}});
  const std::uint64_t before = device_bytes_at_rest(device, at_first);
  const bool lets_go = before <= at_first;  // Note [Cycles of plain autograd]
  Verdict verdict;
  Found found;
  try {
    Rig rig(tested.setting, device, wrap);
    found = run_passes(tested, Ground{device, rig.offloaders(), tested.setting.managed}, rig, expected, lets_go);
    verdict.tally = tally_of(rig.stats());
  } catch (const std::exception& error) {
    found.other = std::string("thrown by the offloader: ") + error.what();
  }
  if (found.difference && is_of_missing_kernels(found.difference->text)) {
    found.difference.reset();
  }
  if (found.difference && is_a_recipes_refusal(tested, expected, *found.difference, device)) {
    found.difference.reset();
    verdict.tally.refusals = 1;
  }
  if (found.difference && (is_whether_a_gradient_requires_one(tested.program, found.difference->text) ||
                           may_race_with_an_error(tested, device, expected) ||
                           !plain_is_steady(tested.program, Ground{device, {}, {}}, expected))) {
    found.difference.reset();
    verdict.tally.unsteady = 1;
  }
  verdict.wrong = found.difference ? std::optional(found.difference->text) : found.other;
  verdict.tally.errors = errors(expected);
  verdict.tally.cycles = lets_go ? 0 : 1;
  if (!verdict.wrong && lets_go) {
    const std::uint64_t after = device_bytes_at_rest(device, before);
    if (after != before) {
      verdict.wrong = std::to_string(after) + " bytes of tensors where there were " + std::to_string(before);
    }
  }
  return verdict;
}

}  // namespace ebb::graphs

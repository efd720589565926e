#include "test/random/shrinker.h"

#include <algorithm>
#include <map>
#include <utility>
#include <vector>

namespace ebb::graphs {
namespace {

// The lines without those in [first, first + count).
Thread without(const Thread& lines, std::size_t first, std::size_t count) {
  std::map<int, int> instead;
  Thread rest;
  const auto replace = [&](std::vector<int>& ids) {
    for (int& id : ids) {
      while (instead.contains(id)) {  // ends: an operand is older than the result
        id = instead[id];
      }
    }
  };
  for (std::size_t i = 0; i < lines.size(); ++i) {
    Instruction line = lines[i];
    replace(line.operands);
    replace(line.inputs);
    if (i < first || i >= first + count) {
      rest.push_back(std::move(line));
    } else if (!line.operands.empty() && line.operation->kind != Kind::kBackward) {
      instead[line.id] = line.operands.front();
    }
  }
  return rest;
}

class Shrinker {
 public:
  Shrinker(Case failing, const std::function<bool(const Case&)>& fails, std::size_t runs)
      : smallest_(std::move(failing)), fails_(fails), runs_left_(runs) {}

  Case shrink() {
    bool changed = true;
    while (changed && runs_left_ > 0) {
      changed = drop_threads() | plainer_setting() | drop_lines() | plainer_lines();
    }
    return smallest_;
  }

 private:
  bool take_if_failing(Case smaller) {
    if (runs_left_ == 0) return false;
    --runs_left_;
    if (!fails_(smaller)) return false;
    smallest_ = std::move(smaller);
    return true;
  }

  template <typename Change>
  bool attempt(const Change& change) {
    Case smaller = smallest_;
    return change(smaller) && take_if_failing(std::move(smaller));
  }

  bool drop_threads() {
    bool changed = false;
    for (std::size_t i = smallest_.program.threads.size(); i-- > 0;) {
      changed |= attempt([i](Case& smaller) {
        auto& threads = smaller.program.threads;
        threads.erase(threads.begin() + static_cast<std::ptrdiff_t>(i));
        return !threads.empty();
      });
    }
    return changed;
  }

  // Delta debugging: halves, quarters, and so on down to single lines. The last ones first: they need the others.
  bool drop_lines() {
    bool changed = false;
    for (std::size_t thread = 0; thread < smallest_.program.threads.size(); ++thread) {
      for (std::size_t size = std::max<std::size_t>(1, smallest_.program.threads[thread].size() / 2); size > 0;
           size /= 2) {
        for (std::size_t end = smallest_.program.threads[thread].size(); end > 0;) {
          const std::size_t first = end > size ? end - size : 0;
          changed |= attempt([&](Case& smaller) {
            Thread& lines = smaller.program.threads[thread];
            lines = without(lines, first, end - first);
            return true;
          });
          end = first;
        }
      }
    }
    return changed;
  }

  // Every member to what it is in a default setting.
  bool plainer_setting() {
    return plainer(&Setting::place) | plainer(&Setting::schedule) | plainer(&Setting::policy) |
           plainer(&Setting::stash_bytes) | plainer(&Setting::window_bytes) | plainer(&Setting::capacity_bytes) |
           plainer(&Setting::managed) | plainer(&Setting::passes) | plainer(&Setting::seed) |
           plainer(&Setting::minimum_bytes);
  }

  template <typename Member>
  bool plainer(Member Setting::*member) {
    return attempt([member](Case& smaller) {
      const Member plain = Setting{}.*member;
      return std::exchange(smaller.setting.*member, plain) != plain;
    });
  }

  bool plainer_lines() {
    bool changed = false;
    for (std::size_t thread = 0; thread < smallest_.program.threads.size(); ++thread) {
      for (std::size_t i = 0; i < smallest_.program.threads[thread].size(); ++i) {
        const auto attempt_line = [&](const auto& change) {
          return attempt([&](Case& smaller) { return change(smaller.program.threads[thread][i]); });
        };
        changed |= attempt_line([](Instruction& line) { return std::exchange(line.kept, false); });
        changed |= attempt_line([](Instruction& line) { return fewer(line.operands, line); });
        changed |= attempt_line([](Instruction& line) { return fewer(line.inputs, line); });
        for (std::uint32_t flag : {kRetain, kCreate, kElsewhere, kTwice}) {
          changed |= attempt_line([flag](Instruction& line) {
            const bool set = line.operation->kind == Kind::kBackward && (line.numbers[0] & flag) != 0;
            line.numbers[0] &= ~(set ? flag : 0);
            return set;
          });
        }
      }
    }
    return changed;
  }

  // Without the last of several roots or inputs.
  static bool fewer(std::vector<int>& ids, const Instruction& line) {
    if (line.operation->kind != Kind::kBackward || ids.size() < 2) return false;
    ids.pop_back();
    return true;
  }

  Case smallest_;
  const std::function<bool(const Case&)>& fails_;
  std::size_t runs_left_;
};

}  // namespace

Case shrink(Case failing, const std::function<bool(const Case&)>& fails, std::size_t most_runs) {
  return Shrinker(std::move(failing), fails, most_runs).shrink();
}

}  // namespace ebb::graphs

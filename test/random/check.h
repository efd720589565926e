#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include <c10/core/Device.h>

#include "test/random/program.h"
#include "test/random/setting.h"

namespace ebb::graphs {

// One program and how it is offloaded.
struct Case {
  Program program;
  Setting setting;
};

// What happened to saves, added up.
struct Tally {
  std::uint64_t saved = 0;
  std::uint64_t offloaded = 0;
  std::uint64_t fetched = 0;
  std::uint64_t reused = 0;
  std::uint64_t recomputed = 0;
  std::uint64_t evicted = 0;
  std::uint64_t kept = 0;
  std::uint64_t graphs_moved = 0;  // in which something was offloaded
  std::uint64_t errors = 0;        // that plain autograd gave
  std::uint64_t cycles = 0;        // graphs that plain autograd itself does not let go of
  std::uint64_t unsteady = 0;      // graphs that plain autograd itself computes now so, now otherwise
  std::uint64_t refusals = 0;      // graphs in which a recipe's input had been written to: Note [Recipes and writes]

  Tally& operator+=(const Tally& other);
};

struct Verdict {
  std::optional<std::string> wrong;  // what differs from plain autograd, or was left behind
  Tally tally;
};

// Note [Cycles of plain autograd]
// `y = x.sin(); x.add_(y)` leaves a tensor that owns, by way of its node, a save of itself: LibTorch never lets go of
// such a graph. With ebb it may or may not be a cycle, for a save that moved holds no tensor, so of these programs only
// what they compute is compared.

// Runs the program with plain autograd, which is the truth, and then under its setting, pass after pass. A difference
// counts only if plain autograd, asked again and again, agrees with itself: some of LibTorch's kernels do not.
[[nodiscard]] Verdict check(const Case& tested, c10::Device device, const WrapTier& wrap = {});

}  // namespace ebb::graphs

// Random graphs with plain autograd as the oracle. The last line is `graphs: N, seed: S, moved: M, wrong: W`.
//
// Exits 0 if nothing was wrong, something was moved and few graphs were excused, 1 if not, 2 for flags that cannot be
// used.

#include <chrono>
#include <cstdint>
#include <iostream>
#include <optional>
#include <string>

#include <CLI/CLI.hpp>
#include <c10/core/Device.h>

#include "test/machine.h"
#include "test/random/check.h"
#include "test/random/crash_note.h"
#include "test/random/generator.h"
#include "test/random/shrinker.h"

namespace ebb::graphs {
namespace {

constexpr std::uint64_t kMostReports = 5;  // that are shrunk
constexpr std::uint64_t kMostLines = 200;

struct Flags {
  std::uint64_t graphs = 3000;
  std::uint64_t first = 0;
  std::uint64_t seed = 1;
  std::uint64_t times = 1;
  std::string device = "cpu";
  std::optional<double> seconds;
  bool print = false;
};

std::optional<int> parse(int argc, char** argv, Flags& flags) {
  CLI::App app("Runs random programs with and without ebb and compares all that they compute, bit for bit.", "random");
  app.add_option("--graphs", flags.graphs, "How many")
      ->check(CLI::Range(std::uint64_t{1}, std::uint64_t{1'000'000'000}))
      ->capture_default_str();
  app.add_option("--seed", flags.seed, "Of all choices")->check(CLI::NonNegativeNumber)->capture_default_str();
  app.add_option("--first", flags.first, "The first graph's number")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  app.add_option("--times", flags.times, "How often each runs: what goes wrong rarely")
      ->check(CLI::Range(std::uint64_t{1}, std::uint64_t{1'000'000'000}))
      ->capture_default_str();
  add_device_flag(app, flags.device);
  app.add_option("--seconds", flags.seconds, "Start no graph after this time")->check(CLI::PositiveNumber);
  app.add_flag("--print", flags.print, "Print each program before it runs");
  return ebb::parse(app, argc, argv);
}

class Run {
 public:
  Run(const Flags& flags, c10::Device device) : flags_(flags), device_(device) {}

  int all() {
    const auto start = std::chrono::steady_clock::now();
    const auto out_of_time = [&] {
      return flags_.seconds &&
             std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() > *flags_.seconds;
    };
    install_crash_note(flags_.seed);
    for (std::uint64_t i = 0; i < flags_.graphs && !out_of_time(); ++i) {
      for (std::uint64_t time = 0; time < flags_.times && !out_of_time(); ++time) {
        one(flags_.first + i);
      }
    }
    std::cout << "saves: " << tally_.saved << ", offloaded: " << tally_.offloaded << ", fetched: " << tally_.fetched
              << ", reused: " << tally_.reused << ", recomputed: " << tally_.recomputed
              << ", evicted: " << tally_.evicted << ", kept: " << tally_.kept << "\n"
              << "graphs that moved something: " << tally_.graphs_moved << ", lines: " << lines_
              << ", errors of plain autograd: " << tally_.errors << ", its cycles: " << tally_.cycles
              << ", unsteady: " << tally_.unsteady
              << ", refused by a recipe, for a write that is proven: " << tally_.refusals << "\n";
    const std::uint64_t excused = tally_.unsteady + tally_.cycles + tally_.refusals;
    const bool shows_something = tally_.offloaded > 0 && excused * 10 <= graphs_ + 10;
    if (!shows_something) {
      std::cout << "nothing was offloaded, or over a tenth of the graphs was excused: this run shows nothing\n";
    }
    std::cout << "graphs: " << graphs_ << ", seed: " << flags_.seed << ", moved: " << tally_.offloaded
              << ", wrong: " << wrong_ << std::endl;
    return wrong_ == 0 && shows_something ? 0 : 1;
  }

 private:
  void one(std::uint64_t number) {
    set_crash_note(number);
    const Case made = generate(flags_.seed, number, device_);
    if (flags_.print) {
      std::cout << "graph " << number << ", " << to_text(made.setting) << ":\n" << to_text(made.program) << std::flush;
    }
    const Verdict verdict = checked(number, made);
    ++graphs_;
    lines_ += instructions(made.program);
    tally_ += verdict.tally;
    if (verdict.wrong && ++wrong_ <= kMostLines) {
      std::cout << "WRONG graph " << number << " of seed " << flags_.seed << ": " << *verdict.wrong << std::endl;
      if (wrong_ <= kMostReports) {
        report(number, made);
      }
    }
  }

  // An error that no program should meet, such as a broken GPU context, ends the run; the graph's number must be known.
  Verdict checked(std::uint64_t number, const Case& made) {
    try {
      return check(made, device_);
    } catch (...) {
      std::cout << "ended by graph " << number << " of seed " << flags_.seed << std::endl;
      throw;
    }
  }

  void report(std::uint64_t number, const Case& failing) {
    std::cout << "  repeat: ./dev test random --graphs 1 --first " << number << " --seed " << flags_.seed
              << " --device " << flags_.device << "\n"
              << "  shrinking " << instructions(failing.program) << " lines, " << to_text(failing.setting) << std::endl;
    const Case small = shrink(failing, [&](const Case& smaller) {
      set_crash_note(number);
      return check(smaller, device_).wrong.has_value();
    });
    std::cout << "  shrunk to " << instructions(small.program) << " lines, " << to_text(small.setting) << ":\n"
              << to_text(small.program) << "  " << check(small, device_).wrong.value_or("right, when run once more")
              << std::endl;
  }

  const Flags flags_;
  const c10::Device device_;
  std::uint64_t graphs_ = 0;
  std::uint64_t lines_ = 0;
  std::uint64_t wrong_ = 0;
  Tally tally_;
};

int parse_and_run(int argc, char** argv) {
  Flags flags;
  if (const std::optional<int> status = parse(argc, argv, flags)) {
    return *status;
  }
  return Run(flags, prepare_device(flags.device)).all();
}

}  // namespace
}  // namespace ebb::graphs

int main(int argc, char** argv) {
  return ebb::status_of("random", [&] { return ebb::graphs::parse_and_run(argc, argv); });
}

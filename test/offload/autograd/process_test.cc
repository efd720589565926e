// What happens to ebb when a process ends or forks at an awkward moment, and to the process's memory. Each case starts
// a program of its own (test/process/process_probe.cc), which an alarm ends if it hangs.

#include <sys/wait.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <ostream>
#include <stdexcept>
#include <string>
#include <utility>

#include <catch2/catch.hpp>

namespace ebb {
namespace {

namespace fs = std::filesystem;

constexpr const char* kRefused =
    "ebb: this offloader was made before fork and cannot be used in the child process: its threads and its CUDA "
    "context "
    "did not survive, and what it saved cannot be had back here. Make a new one in the child.\n";

struct Ending {
  int status;  // the exit code; 128 + N where signal N ended it, as shells count
  std::string said;
};

Ending well(std::string said) { return {0, std::move(said)}; }

bool operator==(const Ending& a, const Ending& b) { return a.status == b.status && a.said == b.said; }

std::ostream& operator<<(std::ostream& out, const Ending& ending) {
  return out << "exit code " << ending.status << ":\n" << ending.said;
}

// Bazel starts a test in the folder of its data.
std::string find_probe() {
  const char* named = std::getenv("EBB_PROBE");
  for (const fs::path& path : {fs::path(named == nullptr ? "" : named), fs::path("test/process_probe"),
                               fs::path("bazel-bin/test/process_probe")}) {
    if (fs::is_regular_file(path)) {
      return fs::absolute(path).string();
    }
  }
  throw std::runtime_error("test/process_probe is not built under " + fs::current_path().string() +
                           ", and EBB_PROBE does not name it");
}

Ending run_probe(const std::string& mode, const std::string& environment) {
  const std::string command = environment + " exec " + find_probe() + " " + mode + " 2>&1";
  std::FILE* const out = popen(command.c_str(), "r");
  REQUIRE(out != nullptr);
  std::string said;
  for (int byte = std::fgetc(out); byte != EOF; byte = std::fgetc(out)) {
    said.push_back(static_cast<char>(byte));
  }
  constexpr int kSignalBase = 128;
  const int status = pclose(out);
  return {WIFEXITED(status) ? WEXITSTATUS(status) : kSignalBase + WTERMSIG(status), said};
}

// Without GPUs: where autograd has threads for them, LibTorch itself refuses backward in a forked child. And where one
// is forked, without LeakSanitizer: what only the stacks of its parent's threads hold looks leaked in a child.
Ending probe(const std::string& mode) {
  const bool forks = mode.starts_with("fork");
  return run_probe(mode,
                   std::string("CUDA_VISIBLE_DEVICES=") + (forks ? " ASAN_OPTIONS=$ASAN_OPTIONS:detect_leaks=0" : ""));
}

std::string repeated(int times, const std::string& text) {
  std::string all;
  for (int i = 0; i < times; ++i) {
    all += text;
  }
  return all;
}

const Ending kSilent{0, ""};

}  // namespace

TEST_CASE("a process whose graph is destroyed after main, before its offloader, ends well", "[process]") {
  CHECK(probe("graph_before_offloader") == kSilent);
}

TEST_CASE("a process whose graph is destroyed after main, after its offloader, ends well", "[process]") {
  CHECK(probe("graph_after_offloader") == kSilent);
}

TEST_CASE("a process that leaves main with copies in flight ends well", "[process]") {
  CHECK(probe("globals_in_flight") == kSilent);
}

TEST_CASE("std::exit with copies in flight ends well, though nothing is destroyed", "[process]") {
  CHECK(probe("exit_in_flight") == kSilent);
}

TEST_CASE("an engine that was the default before is asked for all that ebb does not answer", "[process]") {
  CHECK(probe("engine_of_program") == well("before: hooks yes, metadata no, backward yes\n"
                                           "outside: hooks yes, metadata no, backward yes\n"
                                           "guarded: hooks no, metadata no, backward yes\n"
                                           "guarded: hooks no, metadata yes, backward yes\n"
                                           "left to LibTorch: hooks yes, metadata no, backward yes\n"
                                           "moved\n"));
}

TEST_CASE("std::exit under a guard ends well", "[process]") { CHECK(probe("exit_under_guard") == kSilent); }

TEST_CASE("std::exit on another thread than main's destroys a global offloader in peace", "[process]") {
  CHECK(probe("exit_from_thread") == kSilent);
}

TEST_CASE("std::exit in the midst of a backward pass ends well", "[process]") {
  CHECK(probe("exit_during_backward") == kSilent);
}

TEST_CASE("a static offloader says after main what came of it, and one that outlives the logger is silent",
          "[process]") {
  const Ending said = probe("static_offloader");
  CHECK(said.status == 0);
  CHECK_THAT(said.said, Catch::Contains("in 3 steps"));
  CHECK(probe("offloader_after_log") == kSilent);
}

TEST_CASE("a forked child that does nothing exits well, and its parent's gradients are exact", "[process]") {
  CHECK(probe("fork_and_exit") == well("child: exit 0\nexact\n"));
}

TEST_CASE("a forked child may _exit, and its parent's gradients are exact", "[process]") {
  CHECK(probe("fork_and_exit_at_once") == well("child: exit 0\nexact\n"));
}

TEST_CASE("a fork while copies are in flight harms neither child nor parent", "[process]") {
  CHECK(probe("fork_in_flight") == well("child: exit 0\nexact\n"));
}

TEST_CASE("a forked child may destroy its copies of graph and offloader while copies are in flight", "[process]") {
  CHECK(probe("fork_and_drop") == well("child: exit 0\nexact\n"));
}

TEST_CASE("a save in a child that was forked under a guard is one clear error, and none once the guard is left",
          "[process]") {
  CHECK(probe("fork_under_guard") == well(repeated(1, kRefused) + "nothing\nchild: exit 0\nexact\n"));
}

TEST_CASE("each use of its parent's offloader in a forked child is the same clear error", "[process]") {
  CHECK(probe("fork_and_ask") == well(repeated(6, kRefused) + "child: exit 0\nexact\n"));
}

TEST_CASE("each use of its parent's managed tensors in a forked child is the same clear error", "[process]") {
  CHECK(probe("fork_with_managed") == well(repeated(3, kRefused) + "child: exit 0\nexact\nexact\n"));
}

TEST_CASE("a forked child has no use of its parent's optimizer, and may destroy it", "[process]") {
  CHECK(probe("fork_with_optimizer") == well(repeated(1, kRefused) + "child: exit 0\nexact\n"));
}

TEST_CASE("backward through its parent's graph in a forked child is one clear error each time", "[process]") {
  CHECK(probe("fork_and_unpack") == well(repeated(2, kRefused) + "child: exit 0\nexact\n"));
}

TEST_CASE("backward in a child that was forked in the second run of a checkpointed region is one clear error",
          "[process]") {
  CHECK(probe("fork_in_second_run") ==
        well("ebb: this checkpointed region" + std::string(kRefused).substr(std::string("ebb: this offloader").size()) +
             "child: exit 0\nexact\n"));
}

TEST_CASE("backward in a forked child through a checkpointed region is exact", "[process]") {
  CHECK(probe("fork_between_runs") == well("exact\nchild: exit 0\n"));
}

TEST_CASE("a forked child may make an offloader of its own, and so is a parent itself", "[process]") {
  CHECK(probe("fork_and_make_own") ==
        well("exact\nmoved: 13\n" + repeated(1, kRefused) + "child: exit 0\nexact\nchild: exit 0\nexact\n"));
}

TEST_CASE("backward in a forked child through saves that all passed through is exact", "[process]") {
  CHECK(probe("fork_and_use_kept") == well("exact\nchild: exit 0\n"));
}

TEST_CASE("forks among threads that hold ebb's locks leave no child hanging", "[process]") {
  CHECK(probe("fork_among_threads") == well(repeated(10, "ebb: this offloader\nchild: exit 0\n") + "exact\n"));
}

TEST_CASE("a thousand forks beside a thread that uses managed tensors leave no child hanging", "[process]") {
  CHECK(probe("fork_beside_managed_training") == well("children that ended well: 1000\n"));
}

TEST_CASE("after a fork of a process that uses a GPU the child gets a clear error and the parent goes on exactly",
          "[process][gpu]") {
  CHECK(run_probe("fork_on_gpu", "") == well(repeated(1, kRefused) + "child: exit 0\nexact\n"));
}

TEST_CASE("an offloader over the CPU has freed memory go back to the system, also after its end", "[process]") {
  CHECK(probe("memory_returned") == well("returned\nreturned\nequal\n"));
}

TEST_CASE("an offloader that is told so leaves malloc alone", "[process]") {
  const Ending ending = probe("memory_left_to_malloc");
  CHECK(ending.status == 0);
  CHECK(ending.said.starts_with("LibTorch's allocator\n"));  // what malloc does then is its own affair
}

TEST_CASE("a CPU allocator that the program sets, before an offloader or after it, stays", "[process]") {
  CHECK(probe("memory_of_programs_allocator") == well("the program's\nanother\nthe program's\n"));
}

TEST_CASE("states made without an OptimizerStep are warned of once in a process", "[process][managed]") {
  const Ending warned = probe("states_without_a_step");
  CHECK(warned.status == 0);
  const std::string what = "put an ebb::OptimizerStep around step()";
  const std::size_t first = warned.said.find(what);
  CHECK(warned.said.starts_with("state\n"));
  REQUIRE(first != std::string::npos);
  CHECK(warned.said.find(what, first + 1) == std::string::npos);
  CHECK(probe("states_within_a_step") == well(repeated(5, "state\n")));
}

}  // namespace ebb

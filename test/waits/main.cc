// Is every wait of the library needed, and would a test tell if it were gone?
//
// Leaves out each wait of streams/wait_point.h in turn, by the environment variable EBB_WITHOUT_WAIT, and runs the
// tests tagged [ordering] under several sets of random orders (EBB_SEED). A wait counts as caught if under every seed a
// test fails, or the check of order ends the run. Must be started where the test binaries lie at test/NAME.
//
// Exits 0 if all were caught; 1 if not, or if a test fails with every wait in force; 2 for bad flags.

#include <fcntl.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdint>
#include <cstdlib>
#include <iostream>
#include <string>
#include <vector>

#include <CLI/CLI.hpp>

#include "streams/wait_point.h"

namespace {

const std::vector<std::string> kBinaries{"test/offload_test", "test/streams_test"};
constexpr const char* kSecondsPerRun = "120";  // a run that hangs has not caught anything

struct Options {
  unsigned seeds = 20;
  std::string only;
};

enum class Outcome : std::uint8_t { kPassed, kFailed, kHung, kNotStarted };

// Runs a binary's ordering tests, silently. `without`: the name of a wait; empty for none.
Outcome run(const std::string& binary, const std::string& without, unsigned seed) {
  setenv("EBB_SEED", std::to_string(seed).c_str(), 1);
  if (without.empty()) {
    unsetenv("EBB_WITHOUT_WAIT");
  } else {
    setenv("EBB_WITHOUT_WAIT", without.c_str(), 1);
  }
  std::vector<std::string> words{"timeout", "--signal=KILL", kSecondsPerRun, binary, "[ordering]"};
  std::vector<char*> arguments;
  for (std::string& word : words) {
    arguments.push_back(word.data());
  }
  arguments.push_back(nullptr);
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_addopen(&actions, STDOUT_FILENO, "/dev/null", O_WRONLY, 0);
  posix_spawn_file_actions_addopen(&actions, STDERR_FILENO, "/dev/null", O_WRONLY, 0);
  pid_t child = 0;
  const int error = posix_spawnp(&child, arguments[0], &actions, nullptr, arguments.data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  int status = 0;
  if (error != 0 || waitpid(child, &status, 0) != child) {
    return Outcome::kNotStarted;
  }
  if (WIFSIGNALED(status)) {
    return WTERMSIG(status) == SIGKILL ? Outcome::kHung : Outcome::kFailed;
  }
  switch (WEXITSTATUS(status)) {
    case 0:
      return Outcome::kPassed;
    case 124:
    case 128 + SIGKILL:
      return Outcome::kHung;
    case 126:
    case 127:
      return Outcome::kNotStarted;
    default:
      return Outcome::kFailed;
  }
}

// Whether some binary's tests fail without the wait, under this seed.
bool caught(const std::string& without, unsigned seed) {
  for (const std::string& binary : kBinaries) {
    if (run(binary, without, seed) == Outcome::kFailed) {
      return true;
    }
  }
  return false;
}

bool green_with_every_wait() {
  for (const std::string& binary : kBinaries) {
    if (run(binary, "", 0) != Outcome::kPassed) {
      std::cout << binary << " \"[ordering]\" does not pass with every wait in force\n";
      return false;
    }
  }
  return true;
}

}  // namespace

int main(int argc, char** argv) {
  Options options;
  CLI::App app("Leaves out each wait of the library in turn: do tests fail?");
  app.add_option("--seeds", options.seeds, "sets of random orders to try each with")->check(CLI::Range(1, 1000));
  app.add_option("--only", options.only, "the name of the one wait to leave out");
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : 2;
  }

  if (!green_with_every_wait()) {
    return 1;
  }
  unsigned waits = 0;
  unsigned all_caught = 0;
  for (const ebb::WaitPointName& wait : ebb::kWaitPoints) {
    const std::string name(wait.name);
    if (wait.gpu_only || (!options.only.empty() && options.only != name)) {
      continue;
    }
    ++waits;
    unsigned seed = 0;
    while (seed < options.seeds && caught(name, seed)) {
      ++seed;
    }
    all_caught += seed == options.seeds ? 1 : 0;
    if (seed == options.seeds) {
      std::cout << "without " << name << ": a test fails under each of " << seed << " seeds" << std::endl;
    } else {
      std::cout << "without " << name << ": NO TEST FAILS under seed " << seed << std::endl;
    }
  }
  if (waits == 0) {
    std::cout << "no wait is called " << options.only << '\n';
    return 2;
  }
  std::cout << "waits: " << waits << ", caught: " << all_caught << '\n';
  return waits == all_caught ? 0 : 1;
}

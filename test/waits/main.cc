// Is every wait of the library needed, and would a test tell if it were gone?
//
// Leaves out each wait of streams/base/wait_point.h in turn, by the environment variable EBB_WITHOUT_WAIT, and runs the
// tests tagged [ordering] under several sets of random orders (EBB_SEED). A wait counts as caught if under every seed a
// test fails, or the check of order ends the run. Must be started where the test binaries lie at test/NAME.
//
// With --gpu the list includes the waits that only a GPU's tier has, and the tests those tagged [gpu_ordering], which
// hold up streams, lanes and copy engines. It then also says which waits these tests catch with the check of order
// silenced (EBB_ORDER_UNCHECKED), by wrong bytes alone. They cannot catch what a GPU's path does not have (a disk's
// waits), nor what costs a second copy and changes no byte (pending_uses).
//
// Exits 0 if all were caught; 1 if not, or if a test fails with every wait in force; 2 for bad flags, and for --gpu
// without a GPU.

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
#include <cuda_runtime_api.h>

#include "test/checked/wait_points.h"

namespace {

const std::vector<std::string> kBinaries{"test/offload_test", "test/streams_test"};
constexpr const char* kSecondsPerRun = "120";  // a run that hangs has not caught anything

struct Options {
  unsigned seeds = 20;
  std::string only;
  bool gpu = false;
};

// How to look for a missing wait.
struct Look {
  const char* tests;
  bool check_of_order;
};
constexpr Look kOnCpu{"[ordering]", true};
constexpr Look kOnGpu{"[ordering],[gpu_ordering]", true};
constexpr Look kByBytesAlone{"[gpu_ordering]", false};

enum class Outcome : std::uint8_t { kPassed, kFailed, kHung, kNotStarted };

void set_variable(const char* name, const std::string& value) {
  if (value.empty()) {
    unsetenv(name);
  } else {
    setenv(name, value.c_str(), 1);
  }
}

// Runs a binary's tests, silently. `without`: the name of a wait; empty for none.
Outcome run(const std::string& binary, const Look& look, const std::string& without, unsigned seed) {
  set_variable("EBB_SEED", std::to_string(seed));
  set_variable("EBB_WITHOUT_WAIT", without);
  set_variable("EBB_ORDER_UNCHECKED", look.check_of_order ? "" : "1");
  std::vector<std::string> words{"timeout", "--signal=KILL", kSecondsPerRun, binary, look.tests};
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
bool caught(const Look& look, const std::string& without, unsigned seed) {
  for (const std::string& binary : kBinaries) {
    if (run(binary, look, without, seed) == Outcome::kFailed) {
      return true;
    }
  }
  return false;
}

// The first seed under which no test fails without the wait; `seeds` if there is none.
unsigned first_not_caught(const Look& look, const std::string& without, unsigned seeds) {
  unsigned seed = 0;
  while (seed < seeds && caught(look, without, seed)) {
    ++seed;
  }
  return seed;
}

bool green_with_every_wait(const Look& look) {
  for (const std::string& binary : kBinaries) {
    if (run(binary, look, "", 0) != Outcome::kPassed) {
      std::cout << binary << " \"" << look.tests << "\" does not pass with every wait in force\n";
      return false;
    }
  }
  return true;
}

// On a GPU. Three waits are the disk's, and without the fourth a copy is only made twice.
bool may_show_in_bytes(const std::string& name) {
  return name != "disk_gates" && name != "disk_last_part" && name != "host_wait" && name != "pending_uses";
}

bool has_gpu() {
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error != cudaSuccess) {
    std::cerr << "waits: --gpu needs a GPU, and none can be used here: " << cudaGetErrorString(error) << '\n';
  }
  return error == cudaSuccess;
}

}  // namespace

int main(int argc, char** argv) {
  Options options;
  CLI::App app("Leaves out each wait of the library in turn: do tests fail?");
  app.add_option("--seeds", options.seeds, "sets of random orders to try each with")->check(CLI::Range(1, 1000));
  app.add_option("--only", options.only, "the name of the one wait to leave out");
  app.add_flag("--gpu", options.gpu, "also with the tests that need a GPU, and with those alone");
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : 2;
  }

  if (options.gpu && !has_gpu()) {
    return 2;
  }

  const Look look = options.gpu ? kOnGpu : kOnCpu;
  if (!green_with_every_wait(look) || (options.gpu && !green_with_every_wait(kByBytesAlone))) {
    return 1;
  }
  unsigned waits = 0;
  unsigned all_caught = 0;
  unsigned by_bytes_alone = 0;
  bool all_visible = true;
  for (const ebb::WaitPointName& wait : ebb::kWaitPoints) {
    const std::string name(wait.name);
    if ((wait.gpu_only && !options.gpu) || (!options.only.empty() && options.only != name)) {
      continue;
    }
    ++waits;
    const unsigned seed = first_not_caught(look, name, options.seeds);
    all_caught += seed == options.seeds ? 1 : 0;
    if (seed == options.seeds) {
      std::cout << "without " << name << ": a test fails under each of " << seed << " seeds";
    } else {
      std::cout << "without " << name << ": NO TEST FAILS under seed " << seed;
    }
    if (options.gpu) {
      const bool by_bytes = first_not_caught(kByBytesAlone, name, options.seeds) == options.seeds;
      by_bytes_alone += by_bytes ? 1 : 0;
      all_visible = all_visible && (by_bytes || !may_show_in_bytes(name));
      std::cout << "; by bytes alone: " << (by_bytes ? "caught" : "not caught");
    }
    std::cout << std::endl;
  }
  if (waits == 0) {
    std::cout << "no wait is called " << options.only << '\n';
    return 2;
  }
  if (options.gpu) {
    std::cout << "caught by bytes alone: " << by_bytes_alone << '\n';
  }
  std::cout << "waits: " << waits << ", caught: " << all_caught << '\n';
  return waits == all_caught && all_visible ? 0 : 1;
}

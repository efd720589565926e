// The main of every test binary. Test cases tagged [gpu] or [multi_gpu] are named as skipped where the machine has
// too few GPUs, and the last line is `cases: P passed, F failed, S skipped`, which `./dev test` adds up.
//
// Exits 0 if every selected test case passed or was skipped and there was at least one; else 1.

#define CATCH_CONFIG_RUNNER
#include <algorithm>
#include <cstddef>
#include <iostream>
#include <optional>
#include <string>
#include <vector>

#include <catch2/catch.hpp>
#include <cuda_runtime_api.h>

namespace {

// Catch2 hands the totals of a run to listeners only.
Catch::Counts run_counts;

struct CountCases : Catch::TestEventListenerBase {
  using TestEventListenerBase::TestEventListenerBase;

  void testRunEnded(const Catch::TestRunStats& stats) override { run_counts = stats.totals.testCases; }
};
CATCH_REGISTER_LISTENER(CountCases)

int gpu_count() {
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error == cudaSuccess) return count;
  std::cout << "no GPU here: " << cudaGetErrorString(error) << '\n';
  // Or a test that reads CUDA's last error later would find this one.
  (void)cudaGetLastError();
  return 0;
}

// What the test case lacks on a machine with `gpus` GPUs, if anything.
std::optional<std::string> missing(const Catch::TestCase& test, int gpus) {
  const auto tagged = [&test](const char* tag) {
    return std::find(test.lcaseTags.begin(), test.lcaseTags.end(), tag) != test.lcaseTags.end();
  };
  if (gpus < 1 && tagged("gpu")) return "needs a GPU";
  if (gpus < 2 && tagged("multi_gpu")) return "needs two GPUs";
  return std::nullopt;
}

// Names those of the selected test cases that cannot run here and returns how many they are; takes all that cannot
// run out of the registry. Catch2 v2 has no way to skip; its own --filenames-as-tags edits the same list.
std::size_t skip_what_cannot_run(const Catch::Config& config, std::vector<Catch::TestCase>& registered) {
  const int gpus = gpu_count();
  std::size_t skipped = 0;
  const auto cannot_run = [&](const Catch::TestCase& test) {
    const auto reason = missing(test, gpus);
    const bool selected =
        config.hasTestFilters() ? Catch::matchTest(test, config.testSpec(), config) : !test.isHidden();
    if (reason && selected) {
      std::cout << "SKIPPED (" << *reason << "): " << test.name << '\n';
      ++skipped;
    }
    return reason.has_value();
  };
  std::erase_if(registered, cannot_run);
  return skipped;
}

}  // namespace

int main(int argc, char** argv) {
  // What was printed before a crash is needed most.
  std::cout << std::unitbuf;
  Catch::Session session;
  if (session.applyCommandLine(argc, argv) != 0) return 1;
  const Catch::ConfigData& asked = session.configData();
  if (asked.showHelp || asked.libIdentify || asked.listTests || asked.listTestNamesOnly || asked.listTags ||
      asked.listReporters) {
    session.run();
    return 0;
  }

  const Catch::Config& config = session.config();
  auto& registered = const_cast<std::vector<Catch::TestCase>&>(Catch::getAllTestCasesSorted(config));
  const std::size_t skipped = skip_what_cannot_run(config, registered);
  // Catch2 would fill an empty list anew.
  const int status = registered.empty() ? 0 : session.run();
  const std::size_t passed = run_counts.passed + run_counts.failedButOk;
  std::cout << "cases: " << passed << " passed, " << run_counts.failed << " failed, " << skipped << " skipped" << '\n';
  return status == 0 && run_counts.failed == 0 && passed + skipped > 0 ? 0 : 1;
}

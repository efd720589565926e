// Does every refusal of the system end in exact gradients or in one typed error, with nothing lost?
//
// Every call that the system may refuse (streams/fault_point.h) fails at its n-th time, for every n of a short run,
// once and from then on. The last line is `injections: N, wrong: W`.
//
// Exits 0 if none was wrong, 1 if some were, 2 for flags that cannot be used.

#include <cstdint>
#include <cstdlib>
#include <exception>
#include <iostream>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <CLI/CLI.hpp>
#include <c10/core/CPUAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/util/Exception.h>

#include "streams/fault_plan.h"
#include "streams/simulated_device_allocator.h"
#include "test/faults/injection.h"
#include "test/faults/step.h"

namespace ebb::faults {
namespace {

constexpr const char* kPointNames[kFaultPoints] = {
    "pinned allocation",   "device allocation", "event creation", "copy", "open", "fallocate", "pread", "pwrite",
    "io_uring submission", "io_uring wait",     "thread start"};

void prepare(c10::Device device) {
  at::set_num_threads(1);
  if (device.is_cuda()) {
    TORCH_CHECK(c10::cuda::device_count() > 0, "--device cuda: this machine has no GPU that can be used");
    setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8", /*overwrite=*/0);  // or matrix products differ from run to run
    at::globalContext().setDeterministicAlgorithms(true, /*warn_only=*/true);
  } else {
    c10::SetCPUAllocator(new SimulatedDeviceAllocator, /*priority=*/255);  // freed memory turns into NaN
  }
}

std::string text_of(const Setting& setting, const Injection& injection) {
  return setting.name + ": " + kPointNames[static_cast<std::size_t>(injection.point)] + " fails at call " +
         std::to_string(injection.nth) + (injection.extent == FaultPlan::Extent::kOnce ? " once" : " and from then on");
}

int run(c10::Device device) {
  prepare(device);
  const Step step(device);
  const std::vector<at::Tensor> expected = step.run(nullptr);
  std::uint64_t injections = 0;
  std::uint64_t all_wrong = 0;
  for (const Setting& setting : settings(device)) {
    const std::vector<std::uint64_t> calls = count_calls(setting, step);
    for (std::size_t point = 0; point < kFaultPoints; ++point) {
      if (calls[point] > 0) {  // said before, in case the process does not survive
        std::cout << setting.name << ": " << calls[point] << " x " << kPointNames[point] << std::endl;
      }
      for (std::uint64_t nth = 1; nth <= calls[point]; ++nth) {
        for (const auto extent : {FaultPlan::Extent::kOnce, FaultPlan::Extent::kFromThenOn}) {
          const Injection injection{static_cast<FaultPoint>(point), nth, extent};
          ++injections;
          if (const std::optional<std::string> found = wrong(setting, step, injection, expected)) {
            ++all_wrong;
            std::cout << "WRONG " << text_of(setting, injection) << ": " << *found << std::endl;
          }
        }
      }
    }
  }
  std::cout << "injections: " << injections << ", wrong: " << all_wrong << std::endl;
  return injections > 0 && all_wrong == 0 ? 0 : 1;
}

}  // namespace
}  // namespace ebb::faults

int main(int argc, char** argv) {
  std::string device = "cpu";
  CLI::App app("Has every call fail that the system may refuse, at every time.", "faults");
  app.add_option("--device", device)->check(CLI::IsMember({"cpu", "cuda"}))->capture_default_str();
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : 2;
  }
  try {
    return ebb::faults::run(device == "cuda" ? c10::Device(c10::kCUDA, 0) : c10::Device(c10::kCPU));
  } catch (const c10::Error& error) {
    std::cerr << "faults: error: " << error.what_without_backtrace() << "\n";
  } catch (const std::exception& error) {
    std::cerr << "faults: error: " << error.what() << "\n";
  }
  return 2;
}

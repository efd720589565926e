// Does every refusal of the system end in exact gradients or in one typed error, with nothing lost?
//
// Every call that the system may refuse (streams/base/fault_point.h) fails at its n-th time, for every n of a short
// run, once and from then on. The last line is `injections: N, wrong: W`.
//
// Exits 0 if none was wrong, 1 if some were, 2 for flags that cannot be used.

#include <cstdint>
#include <iostream>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <CLI/CLI.hpp>
#include <c10/core/Device.h>

#include "test/checked/fault_plan.h"
#include "test/faults/injection.h"
#include "test/faults/step.h"
#include "test/machine.h"

namespace ebb::faults {
namespace {

constexpr const char* kPointNames[kFaultPoints] = {
    "pinned allocation",   "device allocation", "event creation", "copy", "open", "fallocate", "pread", "pwrite",
    "io_uring submission", "io_uring wait",     "thread start"};

std::string text_of(const Setting& setting, const Injection& injection) {
  return setting.name + ": " + kPointNames[static_cast<std::size_t>(injection.point)] + " fails at call " +
         std::to_string(injection.nth) + (injection.extent == FaultPlan::Extent::kOnce ? " once" : " and from then on");
}

// `only`: the name of the one setting to try; empty for all.
int run(c10::Device device, const std::string& only) {
  Step step(device);
  const std::vector<at::Tensor> expected = step.run(nullptr, /*managed=*/false);
  std::uint64_t injections = 0;
  std::uint64_t not_made = 0;
  std::uint64_t all_wrong = 0;
  for (const Setting& setting : settings(device)) {
    if (!only.empty() && setting.name != only) {
      continue;
    }
    const std::vector<std::uint64_t> calls = count_calls(setting, step);
    for (std::size_t point = 0; point < kFaultPoints; ++point) {
      if (calls[point] > 0) {  // said before, in case the process does not survive
        std::cout << setting.name << ": " << calls[point] << " x " << kPointNames[point] << std::endl;
      }
      for (std::uint64_t nth = 1; nth <= calls[point]; ++nth) {
        for (const auto extent : {FaultPlan::Extent::kOnce, FaultPlan::Extent::kFromThenOn}) {
          const Injection injection{static_cast<FaultPoint>(point), nth, extent};
          const Verdict verdict = inject(setting, step, injection, expected);
          ++(verdict.made ? injections : not_made);
          if (verdict.wrong) {
            ++all_wrong;
            std::cout << "WRONG " << text_of(setting, injection) << ": " << *verdict.wrong << std::endl;
          }
        }
      }
    }
  }
  std::cout << "not made, because the call did not come: " << not_made << "\n"
            << "injections: " << injections << ", wrong: " << all_wrong << std::endl;
  return injections > 10 * not_made && all_wrong == 0 ? 0 : 1;
}

int parse_and_run(int argc, char** argv) {
  std::string device = "cpu";
  CLI::App app("Has every call fail that the system may refuse, at every time.", "faults");
  add_device_flag(app, device);
  std::string only;
  app.add_option("--only", only, "The name of the one setting to try; 0 injections if there is none of that name");
  if (const std::optional<int> status = parse(app, argc, argv)) {
    return *status;
  }
  return run(prepare_device(device), only);
}

}  // namespace
}  // namespace ebb::faults

int main(int argc, char** argv) {
  return ebb::status_of("faults", [&] { return ebb::faults::parse_and_run(argc, argv); });
}

// Options are checked where they enter, with one error that has the numbers.

#include "offload/options.h"

#include <algorithm>
#include <filesystem>
#include <limits>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <catch2/catch.hpp>

#include "offload/offloader.h"
#include "test/offload/parity.h"
#include "test/offload/printed.h"

namespace ebb {
namespace {

using Catch::Contains;

std::string refusal(const Options& options) {
  try {
    const Offloader offloader(options);
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
  return "accepted";
}

Options on_cpu() {
  Options options;
  options.device = c10::Device(c10::kCPU);
  return options;
}

TEST_CASE("sizes of zero and below are refused with the option's name and the number") {
  const std::vector<std::pair<std::string, std::optional<std::uint64_t> Options::*>> sizes{
      {"stash_bytes", &Options::stash_bytes},
      {"window_bytes", &Options::window_bytes},
      {"capacity_bytes", &Options::capacity_bytes},
  };
  for (const auto& [name, member] : sizes) {
    Options options = on_cpu();
    options.*member = 0;
    CHECK_THAT(refusal(options), Contains(name) && Contains(" 0 bytes"));
    options.*member = static_cast<std::uint64_t>(-17);
    CHECK_THAT(refusal(options), Contains(name) && Contains("-17 bytes"));
    options.*member = 1;
    CHECK(refusal(options) == "accepted");
  }
}

TEST_CASE("a warning level outside (0, 1] is refused with the number") {
  for (const double level : {0.0, -0.5, 1.01, 60.0, std::numeric_limits<double>::quiet_NaN()}) {
    Options options = on_cpu();
    options.host_memory_warning = level;
    CHECK_THAT(refusal(options), Contains("host_memory_warning") && Contains(std::to_string(level)));
  }
  Options options = on_cpu();
  options.host_memory_warning = 1;
  CHECK(refusal(options) == "accepted");
}

TEST_CASE("a spill folder that is missing, a file, or not writable is refused by name") {
  Options options = on_cpu();
  options.spill_folder = "/no/such/folder";
  options.home = Home::kHost;
  CHECK(refusal(options) == "accepted");  // no folder is needed
  options.home = Home::kAuto;
  CHECK_THAT(refusal(options), Contains("spill_folder") && Contains("\"/no/such/folder\"") && Contains("No such file"));
  options.spill_folder = "/proc/version";
  CHECK_THAT(refusal(options), Contains("\"/proc/version\"") && Contains("Not a directory"));
  options.spill_folder = "";
  CHECK_THAT(refusal(options), Contains("spill_folder"));
}

TEST_CASE("a spill folder that may not be written to is refused by name") {
  Options options = on_cpu();
  options.spill_folder = "/proc/self";  // even for root
  std::string error;
  try {
    const Offloader offloader(options);
  } catch (const std::exception& refused) {
    error = refused.what();
  }
  CHECK_THAT(error, Contains("/proc/self"));
}

TEST_CASE("a spill folder on tmpfs is accepted with a warning that names it") {
  if (!std::filesystem::is_directory("/dev/shm")) {
    WARN("no /dev/shm here");
    return;
  }
  Options options = on_cpu();
  options.spill_folder = "/dev/shm";
  Printed printed;
  const std::string refused = refusal(options);
  const std::string text = printed.take();
  CHECK(refused == "accepted");
  CHECK_THAT(text, Contains("warn") && Contains("\"/dev/shm\"") && Contains("tmpfs"));
}

TEST_CASE("a spill folder on a disk is accepted in silence") {
  Printed printed;
  const std::string refused = refusal(on_cpu());
  CHECK(printed.take().empty());
  CHECK(refused == "accepted");
}

// What an offloader prints whose pool grows twice.
std::string printed_by_growth(double warning_level) {
  constexpr std::int64_t kFloats = 17 << 20;  // 68 MiB, and for the small one the pool takes 64 MiB
  Setting setting = late_without_stash();
  setting.options.host_memory_warning = warning_level;
  Rig rig(setting);
  Printed printed;
  {
    const OffloadGuard guard(rig.offloader());
    const at::Tensor small = (at::ones({4}).requires_grad_() * 2).pow(2);
    const at::Tensor big = (at::ones({kFloats}).requires_grad_() * 2).pow(2);
  }
  std::string text = printed.take();
  CHECK(rig.stats().pool_growths == 2);
  return text;
}

TEST_CASE("host memory in use over the level is warned of once, and below it never") {
  const std::string text = printed_by_growth(1e-6);
  CHECK_THAT(text, Contains("host memory") && Contains("warn"));
  CHECK(std::count(text.begin(), text.end(), '\n') == 1);
  CHECK(printed_by_growth(1).empty());
}

TEST_CASE("a device that ebb has no tier for is refused by name") {
  Options options;
  options.device = c10::Device(c10::kMeta);
  CHECK_THAT(refusal(options), Contains("Options::device") && Contains("meta"));
}

TEST_CASE("a disabled offloader takes any options") {
  Options options;
  options.enabled = false;
  options.stash_bytes = 0;
  options.spill_folder = "/no/such/folder";
  CHECK(refusal(options) == "accepted");
}

}  // namespace
}  // namespace ebb

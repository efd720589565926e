#include "offload/options.h"

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <optional>
#include <stdexcept>
#include <string>

#include "test/fuzz/targets.h"

namespace ebb {
namespace {

// Takes values off the front of the input; zeros when that has run out.
class Taker {
 public:
  explicit Taker(FuzzInput input) : input_(input) {}

  template <typename Value>
  Value take() {
    Value value{};
    const std::size_t bytes = std::min(sizeof(value), input_.size());
    std::memcpy(&value, input_.data(), bytes);
    input_ = input_.subspan(bytes);
    return value;
  }

  std::optional<std::uint64_t> take_size() {
    return take<std::uint8_t>() % 2 == 0 ? std::nullopt : std::optional(take<std::uint64_t>());
  }

  std::string rest() { return {input_.begin(), input_.end()}; }

 private:
  FuzzInput input_;
};

bool usable(const std::optional<std::uint64_t>& bytes) {
  return !bytes || (*bytes > 0 && *bytes <= std::uint64_t{1} << 56);
}

}  // namespace

void fuzz_offload_options(FuzzInput input) {
  Taker taker(input);
  Options options;
  options.enabled = taker.take<std::uint8_t>() % 8 != 7;
  const auto type = static_cast<c10::DeviceType>(taker.take<std::uint8_t>() % c10::COMPILE_TIME_MAX_DEVICE_TYPES);
  options.device = c10::Device(type);
  options.stash_bytes = taker.take_size();
  options.window_bytes = taker.take_size();
  options.capacity_bytes = taker.take_size();
  options.host_memory_warning = taker.take<double>();
  options.spill_folder = taker.rest();
  try {
    validate(options);
  } catch (const std::invalid_argument& error) {
    require_of_parser(options.enabled, "an error in options that are switched off");
    require_of_parser(std::string(error.what()).rfind("ebb: Options::", 0) == 0, "an error that names no option");
    return;
  }
  if (!options.enabled) {
    return;
  }
  require_of_parser(usable(options.stash_bytes) && usable(options.window_bytes) && usable(options.capacity_bytes),
                    "a size outside of its range");
  require_of_parser(options.host_memory_warning > 0 && options.host_memory_warning <= 1, "no fraction");
  require_of_parser(options.device->is_cpu() || options.device->is_cuda(), "a device that ebb does not know");
  require_of_parser(!options.device->is_cpu() || std::filesystem::is_directory(options.spill_folder), "no folder");
}

}  // namespace ebb

#include "offload/options.h"

#include <linux/magic.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <string>

#include "offload/log.h"

namespace ebb {
namespace {

// "-1", given by accident for "no limit", arrives as almost 2^64.
constexpr std::uint64_t kLargestSize = std::uint64_t{1} << 56;

void check_size(const char* name, const std::optional<std::uint64_t>& bytes) {
  if (!bytes || (*bytes != 0 && *bytes <= kLargestSize)) {
    return;
  }
  const std::string value = *bytes == 0 ? "0" : std::to_string(static_cast<std::int64_t>(*bytes));
  throw std::invalid_argument("ebb: Options::" + std::string(name) + " is " + value +
                              " bytes; it must be positive, or nullopt to let ebb choose");
}

void check_spill_folder(const std::filesystem::path& folder) {
  const auto refuse = [&](const std::string& why) {
    throw std::invalid_argument("ebb: Options::spill_folder \"" + folder.string() + "\" " + why);
  };
  std::error_code error;
  const std::filesystem::file_status status = std::filesystem::status(folder, error);
  if (!std::filesystem::exists(status)) {
    refuse("does not exist");
  }
  if (!std::filesystem::is_directory(status)) {
    refuse("is not a folder");
  }
  if (access(folder.c_str(), W_OK | X_OK) != 0) {
    refuse(std::string("is not writable: ") + std::strerror(errno));
  }
  struct statfs system = {};
  if (statfs(folder.c_str(), &system) == 0 && system.f_type == TMPFS_MAGIC) {
    log_warning("Options::spill_folder \"" + folder.string() +
                "\" is on tmpfs, which is memory: saves spilled there free none. Name a folder on a disk.");
  }
}

}  // namespace

void validate(const Options& options) {
  if (!options.enabled) {
    return;
  }
  check_size("stash_bytes", options.stash_bytes);
  check_size("window_bytes", options.window_bytes);
  check_size("capacity_bytes", options.capacity_bytes);
  if (!(options.host_memory_warning > 0 && options.host_memory_warning <= 1)) {
    throw std::invalid_argument("ebb: Options::host_memory_warning is " + std::to_string(options.host_memory_warning) +
                                "; it must be a fraction in (0, 1]");
  }
  if (options.device && !options.device->is_cpu() && !options.device->is_cuda()) {
    throw std::invalid_argument("ebb: Options::device is " + options.device->str() +
                                "; it must be a CUDA device or the CPU");
  }
  if (options.device && options.device->is_cpu()) {
    check_spill_folder(options.spill_folder);
  }
}

}  // namespace ebb

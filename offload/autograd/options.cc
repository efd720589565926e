#include "offload/options.h"

#include <linux/magic.h>
#include <sys/vfs.h>

#include <stdexcept>
#include <string>
#include <system_error>
#include <variant>

#include "offload/base/log.h"
#include "streams/disk/spill_folder.h"

namespace ebb {
namespace {

// "-1", given by accident for "no limit", arrives as almost 2^64.
constexpr std::uint64_t kLargestSize = std::uint64_t{1} << 56;

[[noreturn]] void refuse(const std::string& fault) { throw std::invalid_argument("ebb: Options::" + fault); }

bool is_size(std::uint64_t bytes) { return bytes != 0 && bytes <= kLargestSize; }

std::string in_bytes(std::uint64_t bytes) { return std::to_string(static_cast<std::int64_t>(bytes)) + " bytes"; }

void check_size(const char* name, const std::optional<std::uint64_t>& bytes) {
  if (bytes && !is_size(*bytes)) {
    refuse(name + (" is " + in_bytes(*bytes)) + "; it must be positive, or unset, to let ebb choose");
  }
}

struct BudgetFault {
  std::string operator()(const DeviceBytes& budget) const {
    return budget.bytes == kUnlimited || is_size(budget.bytes) ? "" : in_bytes(budget.bytes);
  }
  std::string operator()(const ShareOfFree& budget) const {
    return budget.share > 0 && budget.share <= 1 ? "" : "a share of " + std::to_string(budget.share);
  }
  std::string operator()(const Slowdown& budget) const {
    return budget.fraction >= 0 ? "" : "a slowdown of " + std::to_string(budget.fraction);
  }
  std::string operator()(const LeastMemory& /*budget*/) const { return ""; }
};

void check_budget(const Options& options) {
  if (!options.device_budget) {
    return;
  }
  if (const std::string fault = std::visit(BudgetFault(), *options.device_budget); !fault.empty()) {
    refuse("device_budget is " + fault + "; it must be positive bytes, a share in (0, 1] or a slowdown of at least 0");
  }
  const char* const other = options.policy != nullptr ? "policy"
                            : options.stash_bytes     ? "stash_bytes"
                            : options.window_bytes    ? "window_bytes"
                                                      : nullptr;
  if (other != nullptr) {
    refuse(std::string("device_budget and Options::") + other + " are both set: leave that to the budget's plan");
  }
}

// Whether the fault is this process's and not the folder's.
bool is_shortage(const std::error_code& code) {
  return code == std::errc::too_many_files_open || code == std::errc::too_many_files_open_in_system ||
         code == std::errc::not_enough_memory;
}

// The constructor of SpillFolder is the check. Its exceptions about the folder become errors about the option.
void check_spill_folder(const std::filesystem::path& path) {
  try {
    const SpillFolder folder(path);
    struct statfs system = {};
    if (fstatfs(folder.fd(), &system) == 0 && system.f_type == TMPFS_MAGIC) {
      log_warning("Options::spill_folder \"" + path.string() +
                  "\" is on tmpfs, which is memory: saves spilled there free no memory. Name a folder on a disk.");
    }
  } catch (const std::system_error& error) {
    if (is_shortage(error.code())) {
      throw;
    }
    refuse("spill_folder: " + std::string(error.what()));
  } catch (const std::invalid_argument& error) {
    refuse("spill_folder: " + std::string(error.what()));
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
    refuse("host_memory_warning is " + std::to_string(options.host_memory_warning) +
           "; it must be a fraction in (0, 1]");
  }
  check_size("planned_minimum_bytes", options.planned_minimum_bytes);
  check_budget(options);
  if (options.device && !options.device->is_cpu() && !options.device->is_cuda()) {
    refuse("device is " + options.device->str() + "; it must be a CUDA device or the CPU");
  }
  if (options.device && options.device->is_cuda() && options.home == Home::kDisk) {
    refuse("home is the disk, and Options::device " + options.device->str() + "; beside a GPU it must be host memory");
  }
  if (options.device && options.device->is_cpu() && options.home != Home::kHost) {
    check_spill_folder(options.spill_folder);
  }
}

}  // namespace ebb

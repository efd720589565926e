#include "streams/base/system_memory.h"

#include <algorithm>
#include <fstream>
#include <limits>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <system_error>

namespace ebb {
namespace {

// The lines of a file that begin with a name and a number. None where the file cannot be read.
std::map<std::string, std::uint64_t> read_fields(const std::filesystem::path& path) {
  std::ifstream file(path);
  std::map<std::string, std::uint64_t> fields;
  std::string name;
  std::uint64_t number = 0;
  for (std::string rest; file >> name >> number && std::getline(file, rest);) {
    fields.emplace(name, number);
  }
  return fields;
}

SystemMemory read_machine_memory() {
  const auto kib = read_fields("/proc/meminfo");
  const auto total = kib.find("MemTotal:");
  const auto available = kib.find("MemAvailable:");
  if (total == kib.end() || available == kib.end()) {
    constexpr auto kAll = std::numeric_limits<std::uint64_t>::max();
    return {kAll, kAll};
  }
  return {total->second * 1024, available->second * 1024};
}

std::optional<std::uint64_t> read_number(const std::filesystem::path& path) {
  std::ifstream file(path);
  std::uint64_t number = 0;
  return file >> number ? std::optional(number) : std::nullopt;  // "max" is no number: no limit
}

SystemMemory within_control_group(const std::filesystem::path& folder, const SystemMemory& otherwise) {
  std::error_code unreadable;  // an unreadable file counts as absent
  const bool version_2 = std::filesystem::exists(folder / "memory.max", unreadable);
  const auto limit = read_number(folder / (version_2 ? "memory.max" : "memory.limit_in_bytes"));
  const auto used = read_number(folder / (version_2 ? "memory.current" : "memory.usage_in_bytes"));
  if (!limit || !used || *limit >= otherwise.total_bytes) {
    return otherwise;
  }
  const std::uint64_t cache = read_fields(folder / "memory.stat")["inactive_file"];  // what the kernel drops when asked
  const std::uint64_t wanted = *used - std::min(*used, cache);
  return {*limit, std::min(otherwise.available_bytes, *limit - std::min(*limit, wanted))};
}

// This process's group below the root of the hierarchy that has this controller; version 2 has one, and names none.
// Empty where the root is the group: a container sees no others.
std::filesystem::path own_group(std::string_view controller) {
  std::ifstream file("/proc/self/cgroup");
  for (std::string number, controllers, group;
       std::getline(file, number, ':') && std::getline(file, controllers, ':') && std::getline(file, group);) {
    if (controllers == controller) {
      return std::filesystem::path(group).relative_path();
    }
  }
  return {};
}

}  // namespace

SystemMemory within_control_groups(std::filesystem::path root, const std::filesystem::path& group,
                                   const SystemMemory& otherwise) {
  SystemMemory memory = within_control_group(root, otherwise);
  for (const std::filesystem::path& part : group) {
    memory = within_control_group(root /= part, memory);
  }
  return memory;
}

bool leaves_a_reserve(std::uint64_t bytes) {
  constexpr std::uint64_t kPart = 16;
  const SystemMemory memory = read_system_memory();
  const std::uint64_t reserve = memory.total_bytes / kPart;
  return memory.available_bytes >= reserve && memory.available_bytes - reserve >= bytes;
}

SystemMemory read_system_memory() {
  // Version 1 of control groups has a folder for each controller.
  const SystemMemory version_1 =
      within_control_groups("/sys/fs/cgroup/memory", own_group("memory"), read_machine_memory());
  return within_control_groups("/sys/fs/cgroup", own_group(""), version_1);
}

}  // namespace ebb

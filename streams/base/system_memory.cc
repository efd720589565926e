#include "streams/base/system_memory.h"

#include <algorithm>
#include <fstream>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <system_error>

namespace ebb {
namespace {

SystemMemory read_machine_memory() {
  std::ifstream file("/proc/meminfo");
  SystemMemory memory;
  std::string name;
  std::uint64_t kib = 0;
  std::string unit;
  while (file >> name >> kib && std::getline(file, unit)) {
    if (name == "MemTotal:") {
      memory.total_bytes = kib * 1024;
    } else if (name == "MemAvailable:") {
      memory.available_bytes = kib * 1024;
    }
  }
  if (memory.total_bytes == 0 || memory.available_bytes == 0) {
    constexpr auto kAll = std::numeric_limits<std::uint64_t>::max();
    return {kAll, kAll};
  }
  return memory;
}

std::optional<std::uint64_t> read_number(const std::filesystem::path& path) {
  std::ifstream file(path);
  std::uint64_t number = 0;
  return file >> number ? std::optional(number) : std::nullopt;  // "max" is no number: no limit
}

// The group's page cache that the kernel drops when memory is wanted.
std::uint64_t read_inactive_file_bytes(const std::filesystem::path& path) {
  std::ifstream file(path);
  std::string name;
  std::uint64_t bytes = 0;
  while (file >> name >> bytes) {
    if (name == "inactive_file" || name == "total_inactive_file") {
      return bytes;
    }
  }
  return 0;
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

SystemMemory within_control_group(const std::filesystem::path& folder, const SystemMemory& otherwise) {
  std::error_code unreadable;  // an unreadable file counts as absent
  const bool version_2 = std::filesystem::exists(folder / "memory.max", unreadable);
  const auto limit = read_number(folder / (version_2 ? "memory.max" : "memory.limit_in_bytes"));
  const auto used = read_number(folder / (version_2 ? "memory.current" : "memory.usage_in_bytes"));
  if (!limit || !used || *limit >= otherwise.total_bytes) {
    return otherwise;
  }
  const std::uint64_t wanted = *used - std::min(*used, read_inactive_file_bytes(folder / "memory.stat"));
  return {*limit, std::min(otherwise.available_bytes, *limit - std::min(*limit, wanted))};
}

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

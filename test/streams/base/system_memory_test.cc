#include "streams/base/system_memory.h"

#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>

#include <catch2/catch.hpp>

namespace ebb {
namespace {

constexpr std::uint64_t kGiB = std::uint64_t{1} << 30;

// A folder with a control group's files, as the kernel shows them.
class Group {
 public:
  Group() { std::filesystem::create_directory(folder_); }
  ~Group() { std::filesystem::remove_all(folder_); }
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  void write(const std::string& name, const std::string& text) const { std::ofstream(folder_ / name) << text << "\n"; }
  [[nodiscard]] const std::filesystem::path& folder() const { return folder_; }

 private:
  const std::filesystem::path folder_ =
      std::filesystem::temp_directory_path() / ("ebb-group-" + std::to_string(getpid()));
};

}  // namespace

TEST_CASE("this machine has memory, and not more is available than there is") {
  const SystemMemory memory = read_system_memory();
  CHECK(memory.total_bytes > kGiB / 4);
  CHECK(memory.available_bytes > 0);
  CHECK(memory.available_bytes <= memory.total_bytes);
}

TEST_CASE("a control group with less memory than the machine is what counts, its page cache left out") {
  const Group group;
  group.write("memory.max", std::to_string(8 * kGiB));
  group.write("memory.current", std::to_string(5 * kGiB));
  group.write("memory.stat", "anon 1\ninactive_file " + std::to_string(kGiB) + "\nactive_file 7");
  const SystemMemory memory = within_control_groups(group.folder(), "", {64 * kGiB, 60 * kGiB});
  CHECK(memory.total_bytes == 8 * kGiB);
  CHECK(memory.available_bytes == 4 * kGiB);
}

TEST_CASE("of the groups that a process is in, one within the other, the least counts") {
  const Group root;
  std::filesystem::create_directories(root.folder() / "slice/job");
  root.write("slice/memory.limit_in_bytes", std::to_string(8 * kGiB));
  root.write("slice/memory.usage_in_bytes", std::to_string(7 * kGiB));
  root.write("slice/job/memory.limit_in_bytes", std::to_string(6 * kGiB));
  root.write("slice/job/memory.usage_in_bytes", std::to_string(2 * kGiB));
  const SystemMemory memory = within_control_groups(root.folder(), "slice/job", {64 * kGiB, 60 * kGiB});
  CHECK(memory.total_bytes == 6 * kGiB);
  CHECK(memory.available_bytes == 1 * kGiB);
  CHECK(within_control_groups(root.folder(), "gone", {64 * kGiB, 60 * kGiB}).total_bytes == 64 * kGiB);
}

TEST_CASE("a folder of control groups that cannot be looked into changes nothing") {
  const std::string too_long(5000, 'x');  // refused to whoever asks, root too
  const SystemMemory memory = within_control_groups(too_long, "", {64 * kGiB, 60 * kGiB});
  CHECK(memory.total_bytes == 64 * kGiB);
  CHECK(memory.available_bytes == 60 * kGiB);
}

TEST_CASE("a control group without a limit, or with a larger one, changes nothing") {
  const Group group;
  group.write("memory.max", GENERATE(std::string("max"), std::to_string(65 * kGiB)));
  group.write("memory.current", std::to_string(5 * kGiB));
  const SystemMemory memory = within_control_groups(group.folder(), "", {64 * kGiB, 60 * kGiB});
  CHECK(memory.total_bytes == 64 * kGiB);
  CHECK(memory.available_bytes == 60 * kGiB);
}

}  // namespace ebb

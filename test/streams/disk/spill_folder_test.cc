#include "streams/disk/spill_folder.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <stdexcept>
#include <string>
#include <system_error>
#include <vector>

#include <catch2/catch.hpp>

#include "streams/disk/io_queue.h"
#include "streams/disk/spill_file.h"
#include "test/streams/disk/io_testing.h"
#include "test/streams/disk/temporary_folder.h"

namespace ebb {
namespace {

namespace fs = std::filesystem;
using Catch::Contains;

std::string refusal(const fs::path& path) {
  try {
    const SpillFolder folder(path);
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
  return "accepted";
}

void set_mode(const fs::path& path, mode_t mode) { REQUIRE(::chmod(path.c_str(), mode) == 0); }

// Where the system says that the file lies or, once it has no name, lay.
std::string place_of(const FileDescriptor& file) {
  std::array<char, 4096> place{};
  const std::string link = "/proc/self/fd/" + std::to_string(file.get());
  REQUIRE(::readlink(link.c_str(), place.data(), place.size() - 1) > 0);
  return place.data();
}

// Both ways to make a file, unless the file system has only one.
std::vector<FileDescriptor> files_of(const SpillFolder& folder) {
  std::vector<FileDescriptor> files;
  files.push_back(folder.make_unlinked_file([] { return std::string("name"); }));
  if (auto unnamed = folder.make_unnamed_file()) {
    files.push_back(std::move(*unnamed));
  } else {
    WARN("SKIPPED: no O_TMPFILE in " << folder.path());
  }
  return files;
}

TEST_CASE("a spill folder that others may write to is refused with its mode unless it is sticky") {
  const TemporaryFolder folder;
  for (const mode_t mode : {0700, 0500 | S_IWUSR, 0755, 0711, 01777, 01770}) {
    set_mode(folder.path(), mode);
    CHECK(refusal(folder.path()) == "accepted");
  }
  for (const mode_t mode : {0777, 0770, 0702, 0720}) {
    set_mode(folder.path(), mode);
    std::array<char, 8> octal{};
    std::snprintf(octal.data(), octal.size(), "%04o", static_cast<unsigned>(mode));
    CHECK_THAT(refusal(folder.path()), Contains(folder.path().string()) && Contains(octal.data()) &&
                                           Contains("be writable by its owner only or be sticky"));
  }
}

TEST_CASE("a spill folder of another user is refused with the owner, even if it is sticky, and one of root is not") {
  CHECK(refusal("/var/tmp") == "accepted");
  if (::geteuid() != 0) {
    WARN("SKIPPED: only root can give a folder away");
    return;
  }
  const TemporaryFolder folder;
  constexpr uid_t kSomebody = 12345;
  REQUIRE(::chown(folder.path().c_str(), kSomebody, kSomebody) == 0);
  for (const mode_t mode : {0700, 01777}) {
    set_mode(folder.path(), mode);
    CHECK_THAT(refusal(folder.path()), Contains(folder.path().string()) && Contains("belongs to user 12345") &&
                                           Contains("must belong to this user (0) or to root"));
  }
}

TEST_CASE("a file in a spill folder has no name and no link, and is for its owner only") {
  const TemporaryFolder path;
  const SpillFolder folder(path.path());
  for (const FileDescriptor& file : files_of(folder)) {
    CHECK(fs::is_empty(path.path()));
    struct stat info {};
    REQUIRE(::fstat(file.get(), &info) == 0);
    CHECK(info.st_nlink == 0);
    CHECK((info.st_mode & 07777) == 0600);
    CHECK((::fcntl(file.get(), F_GETFD) & FD_CLOEXEC) != 0);
    CHECK((::fcntl(file.get(), F_GETFL) & O_ACCMODE) == O_RDWR);
  }
}

//   the folder is checked | renamed, a link to another folder takes its path | files are made: in the checked folder
TEST_CASE("a folder that is replaced after the check gets no file") {
  const TemporaryFolder parent;
  const fs::path path = parent.path() / "spill";
  const fs::path moved = parent.path() / "moved";
  const fs::path trap = parent.path() / "trap";
  fs::create_directory(path);
  fs::create_directory(trap);
  const SpillFolder folder(path);
  fs::rename(path, moved);
  fs::create_directory_symlink(trap, path);
  for (const FileDescriptor& file : files_of(folder)) {
    CHECK_THAT(place_of(file), Catch::StartsWith(moved.string() + "/"));
  }
}

TEST_CASE("a link to a folder is followed before the check, not after it") {
  const TemporaryFolder parent;
  const fs::path open_to_all = parent.path() / "open";
  const fs::path link = parent.path() / "link";
  fs::create_directory(open_to_all);
  set_mode(open_to_all, 0777);
  fs::create_directory_symlink(open_to_all, link);
  CHECK_THAT(refusal(link), Contains("0777"));
}

TEST_CASE("a name that is taken is neither opened nor removed, and another one is tried") {
  const TemporaryFolder path;
  std::ofstream(path.path() / "taken") << "text";
  fs::create_symlink(path.path() / "taken", path.path() / "link");
  fs::create_symlink("nowhere", path.path() / "dangling");
  const SpillFolder folder(path.path());

  const std::vector<std::string> names{"taken", "link", "dangling", "free"};
  std::size_t asked = 0;
  const FileDescriptor file = folder.make_unlinked_file([&] { return names.at(asked++); });
  CHECK(asked == 4);
  CHECK_THAT(place_of(file), Contains("/free"));
  CHECK(fs::file_size(path.path() / "taken") == 4);
  CHECK(fs::is_symlink(path.path() / "dangling"));
  CHECK_FALSE(fs::exists(path.path() / "nowhere"));

  asked = 0;
  CHECK_THROWS_WITH(folder.make_unlinked_file([&] { return ++asked, std::string("taken"); }),
                    "cannot create a spill file in " + path.path().string() + ": File exists");
  CHECK(asked == 8);
}

TEST_CASE("a file made in either way carries bytes") {
  const DiskIo engine = each_engine();
  const TemporaryFolder path;
  const SpillFolder folder(path.path());
  for (FileDescriptor& descriptor : files_of(folder)) {
    SpillFile file(folder, std::move(descriptor));
    REQUIRE(file.grow(kMiB).has_value());
    const auto queue = std::make_unique<IoQueue>(engine, file, "ebb-test");
    auto content = random_bytes(kMiB, 1);
    std::vector<std::byte> back(kMiB);
    const Ticket written = queue->submit({IoKind::kWrite, 0, content.data(), kMiB, {}});
    queue->submit({IoKind::kRead, 0, back.data(), kMiB, {written}})->synchronize();
    CHECK(back == content);
  }
}

TEST_CASE("a folder without a permission to write is refused with the system's reason") {
  if (::geteuid() == 0) {
    WARN("SKIPPED: root may write to any folder");
    return;
  }
  const TemporaryFolder folder;
  set_mode(folder.path(), 0500);
  CHECK_THROWS_WITH(SpillFolder(folder.path()),
                    "cannot use the spill folder \"" + folder.path().string() + "\": Permission denied");
}

}  // namespace
}  // namespace ebb

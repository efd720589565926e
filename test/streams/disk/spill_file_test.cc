#include "streams/disk/spill_file.h"

#include <fcntl.h>
#include <sched.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iostream>
#include <string>
#include <system_error>

#include <catch2/catch.hpp>

#include "streams/base/aligned_memory.h"
#include "streams/base/system_memory.h"
#include "streams/disk/io_queue.h"
#include "test/streams/disk/io_testing.h"
#include "test/streams/disk/temporary_folder.h"

namespace ebb {
namespace {

namespace fs = std::filesystem;

std::uint64_t file_bytes(const SpillFile& file) {
  struct stat info {};
  REQUIRE(::fstat(file.fd(), &info) == 0);
  return static_cast<std::uint64_t>(info.st_size);
}

std::error_code code_of_making(const fs::path& folder, std::string& message) {
  try {
    const SpillFile file(folder);
  } catch (const std::system_error& error) {
    message = error.what();
    return error.code();
  }
  return {};
}

constexpr int kMayNotMount = 77;

// Own user and mount namespaces, in which this process may mount.
bool enter_namespaces() {
  const std::string user = std::to_string(::getuid());
  const std::string group = std::to_string(::getgid());
  if (::unshare(CLONE_NEWUSER | CLONE_NEWNS) != 0) {
    return false;
  }
  std::ofstream("/proc/self/setgroups") << "deny";
  std::ofstream("/proc/self/uid_map") << user << " " << user << " 1";  // without it no file can be made
  std::ofstream("/proc/self/gid_map") << group << " " << group << " 1";
  return std::to_string(::getuid()) == user;
}

// The exit status of `body`, run in a child that sees a new file system at the folder: 0 if body returned true, 1 if
// not. kMayNotMount where the machine does not let this process mount. The mount is the child's own and goes with it.
int in_private_mount(const char* type, const char* options, const std::function<bool(const fs::path&)>& body) {
  const TemporaryFolder folder;
  const pid_t child = ::fork();
  if (child == 0) {
    if (!enter_namespaces() || ::mount("none", folder.path().c_str(), type, 0, options) != 0) {
      ::_exit(kMayNotMount);
    }
    bool good = false;
    try {
      good = body(folder.path());
    } catch (const std::exception& error) {
      std::cerr << error.what() << std::endl;
    }
    ::_exit(good ? 0 : 1);
  }
  int status = 0;
  REQUIRE(::waitpid(child, &status, 0) == child);
  REQUIRE(WIFEXITED(status));
  if (WEXITSTATUS(status) == kMayNotMount) {
    WARN("SKIPPED: this process may not mount " << type);
  }
  return WEXITSTATUS(status);
}

TEST_CASE("a spill file is not visible in its folder") {
  const TemporaryFolder folder;
  SpillFile file(folder.path());
  REQUIRE(file.grow(kMiB).has_value());
  CHECK(fs::is_empty(folder.path()));
}

TEST_CASE("a spill file's ranges follow one another in whole pages and are reserved on the disk") {
  const TemporaryFolder folder;
  SpillFile file(folder.path());
  const auto first = file.grow(1);
  const auto second = file.grow(3 * kMiB + 1);
  REQUIRE(first.has_value());
  REQUIRE(second.has_value());
  CHECK(*first == 0);
  CHECK(*second == kPageBytes);
  CHECK(file_bytes(file) == 3 * kMiB + 2 * kPageBytes);
  struct stat info {};
  REQUIRE(::fstat(file.fd(), &info) == 0);
  CHECK(static_cast<std::uint64_t>(info.st_blocks) * 512 >= file_bytes(file));
}

TEST_CASE("a spill file is for its owner only and is not inherited by another program") {
  const TemporaryFolder folder;
  const SpillFile file(folder.path());
  struct stat info {};
  REQUIRE(::fstat(file.fd(), &info) == 0);
  CHECK((info.st_mode & 0777) == 0600);
  CHECK((::fcntl(file.fd(), F_GETFD) & FD_CLOEXEC) != 0);
}

TEST_CASE("a spill file knows whether its transfers bypass the page cache") {
  const TemporaryFolder folder;
  const SpillFile file(folder.path());
  CHECK(file.direct() == ((::fcntl(file.fd(), F_GETFL) & O_DIRECT) != 0));
  CHECK(file.direct() == (file.memory_alignment() > 1));
  CHECK(kPageBytes % file.memory_alignment() == 0);
}

TEST_CASE("a folder where no file can be made is named in the error") {
  const TemporaryFolder folder;
  std::string message;

  const fs::path missing = folder.path() / "missing";
  CHECK(code_of_making(missing, message) == std::errc::no_such_file_or_directory);
  CHECK(message == "cannot use the spill folder \"" + missing.string() + "\": No such file or directory");

  const fs::path plain_file = folder.path() / "plain_file";
  std::ofstream(plain_file) << "text";
  CHECK(code_of_making(plain_file, message) == std::errc::not_a_directory);
  CHECK(message == "cannot use the spill folder \"" + plain_file.string() + "\": Not a directory");
}

TEST_CASE("a file size limit stops a spill file without a signal, and raising it lets the file grow on") {
  const TemporaryFolder folder;
  SpillFile file(folder.path());
  rlimit before{};
  REQUIRE(::getrlimit(RLIMIT_FSIZE, &before) == 0);
  rlimit limited = before;
  limited.rlim_cur = 2 * kMiB;
  REQUIRE(::setrlimit(RLIMIT_FSIZE, &limited) == 0);
  const auto within = file.grow(2 * kMiB);
  const auto refused = file.grow(1);
  REQUIRE(::setrlimit(RLIMIT_FSIZE, &before) == 0);

  CHECK(within.has_value());
  CHECK_FALSE(refused.has_value());

  const auto after = file.grow(1);
  REQUIRE(after.has_value());
  CHECK(*after == 2 * kMiB);
}

TEST_CASE("a spill file in memory leaves the system a reserve, and grows on within that") {
  const std::unique_ptr<SpillFile> file = SpillFile::in_memory();
  rlimit before{};
  REQUIRE(::getrlimit(RLIMIT_FSIZE, &before) == 0);
  rlimit limited = before;
  limited.rlim_cur = 2 * kMiB;  // a file that leaves no reserve would otherwise take the machine's memory
  REQUIRE(::setrlimit(RLIMIT_FSIZE, &limited) == 0);
  const auto refused = file->grow(read_system_memory().available_bytes);
  const auto within = file->grow(kMiB);
  REQUIRE(::setrlimit(RLIMIT_FSIZE, &before) == 0);
  CHECK_FALSE(refused.has_value());
  CHECK(within.has_value());
}

TEST_CASE("a size that no file can have is refused and not wrapped around") {
  const TemporaryFolder folder;
  SpillFile file(folder.path());
  REQUIRE(file.grow(kPageBytes).has_value());
  CHECK_FALSE(file.grow(SIZE_MAX).has_value());
  CHECK_FALSE(file.grow(SIZE_MAX / 2).has_value());
  CHECK(file_bytes(file) == kPageBytes);
}

TEST_CASE("a full disk is known when the file grows, and what does fit is still given") {
  const int status = in_private_mount("tmpfs", "size=1m", [](const fs::path& folder) {
    SpillFile file(folder);
    return !file.grow(2 * kMiB).has_value() && file.grow(kMiB / 2).has_value() && !file.grow(kMiB).has_value() &&
           file.grow(kMiB / 2).has_value();
  });
  CHECK((status == 0 || status == kMayNotMount));
}

TEST_CASE("a file system with neither direct I/O nor reservations still carries the bytes") {
  const int status = in_private_mount("ramfs", nullptr, [](const fs::path& folder) {
    SpillFile file(folder);
    const std::string source(5 * kMiB + 1, 'e');
    std::string destination(source.size(), '-');
    if (file.direct() || !file.grow(source.size()).has_value() || file_bytes(file) < source.size()) {
      return false;
    }
    const auto queue = std::make_unique<IoQueue>(DiskIo::kThreads, file, "test");
    const Ticket written = queue->submit({IoKind::kWrite, 0, const_cast<char*>(source.data()), source.size(), {}});
    queue->submit({IoKind::kRead, 0, destination.data(), destination.size(), {written}})->synchronize();
    return source == destination;
  });
  CHECK((status == 0 || status == kMayNotMount));
}

}  // namespace
}  // namespace ebb

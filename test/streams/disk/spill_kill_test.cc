// A process that is killed while it spills leaves no file.

#include <fcntl.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <csignal>
#include <cstddef>
#include <deque>
#include <exception>
#include <filesystem>
#include <string>
#include <vector>

#include <catch2/catch.hpp>

#include "streams/disk/io_queue.h"
#include "streams/disk/spill_file.h"
#include "streams/disk/spill_folder.h"
#include "streams/disk/uring_io.h"
#include "test/streams/disk/io_testing.h"
#include "test/streams/disk/temporary_folder.h"

namespace ebb {
namespace {

enum class Way { kUnnamed, kUnlinked };

// Writes blocks for ever, and says on the pipe when the first has been written.
void spill(const std::filesystem::path& path, Way way, DiskIo engine, int pipe) {
  constexpr std::size_t kBlock = 16 * kPageBytes;
  constexpr std::size_t kBlocks = 32;
  const SpillFolder folder(path);
  SpillFile file(
      folder, way == Way::kUnnamed ? folder.make_file() : folder.make_unlinked_file([] { return std::string("x"); }));
  if (!file.grow(kBlocks * kBlock).has_value()) {
    return;
  }
  const auto queue = std::make_unique<IoQueue>(engine, file, "ebb-test");
  std::vector<std::byte> content(kBlock, std::byte{1});
  std::deque<Ticket> in_flight;
  for (std::uint64_t i = 0;; ++i) {
    in_flight.push_back(queue->submit({IoKind::kWrite, i % kBlocks * kBlock, content.data(), kBlock, {}}));
    if (in_flight.size() == 8) {
      in_flight.front()->synchronize();
      in_flight.pop_front();
      if (i == 7 && ::write(pipe, "s", 1) != 1) {
        return;
      }
    }
  }
}

// True if a child was seen spilling and then killed.
bool kill_while_spilling(const std::filesystem::path& path, Way way, DiskIo engine) {
  std::array<int, 2> pipe{};
  if (::pipe(pipe.data()) != 0) {
    return false;
  }
  const pid_t child = ::fork();
  if (child == 0) {
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    ::close(pipe[0]);
    try {
      spill(path, way, engine, pipe[1]);
    } catch (const std::exception&) {  // then nothing comes through the pipe
    }
    ::_exit(1);
  }
  ::close(pipe[1]);
  char byte = 0;
  const bool spilling = ::read(pipe[0], &byte, 1) == 1;
  ::kill(child, SIGKILL);
  int status = 0;
  ::waitpid(child, &status, 0);
  ::close(pipe[0]);
  return spilling && WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL;
}

// Run by the test below, in a process that has no threads: its children may do more than exec.
TEST_CASE("hidden: 200 processes that are killed while they spill leave no file", "[.][spill_kill]") {
  const TemporaryFolder folder;
  int killed = 0;
  for (int i = 0; i < 200; ++i) {
    const DiskIo engine = i % 2 == 0 || UringIo::refusal() ? DiskIo::kThreads : DiskIo::kUring;
    const Way way = i % 4 < 2 ? Way::kUnnamed : Way::kUnlinked;
    killed += kill_while_spilling(folder.path(), way, engine) ? 1 : 0;
    REQUIRE(std::filesystem::is_empty(folder.path()));
  }
  CHECK(killed == 200);
}

TEST_CASE("200 processes that are killed while they spill leave no file") {
  const pid_t child = ::fork();
  if (child == 0) {
    // Its report goes to stderr, and its count of test cases nowhere: they are not to be added to ours.
    ::close(STDOUT_FILENO);
    ::open("/dev/null", O_WRONLY);
    ::execl("/proc/self/exe", "streams_test", "[spill_kill]", "--out", "/dev/stderr", static_cast<char*>(nullptr));
    ::_exit(77);
  }
  int status = 0;
  REQUIRE(::waitpid(child, &status, 0) == child);
  REQUIRE(WIFEXITED(status));
  CHECK(WEXITSTATUS(status) == 0);
}

}  // namespace
}  // namespace ebb

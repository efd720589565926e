#include "streams/uring_io.h"

#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cstddef>
#include <optional>
#include <system_error>
#include <vector>

#include <catch2/catch.hpp>

#include "streams/disk_tier.h"
#include "test/streams/io_testing.h"

namespace ebb {
namespace {

// Run by the test below, in a process that may not use io_uring.
TEST_CASE("hidden: where io_uring is forbidden threads stand in, and asking for it is an error", "[.][no_uring]") {
  CHECK(UringIo::refusal() == std::errc::operation_not_permitted);
  CHECK_THROWS_WITH(DiskTier("/var/tmp", std::nullopt, IoEngine::kUring),
                    "io_uring was asked for, but this process may not use it: Operation not permitted");
  DiskTier tier("/var/tmp", std::nullopt, IoEngine::kAuto);
  const auto content = random_bytes(5 * kMiB, 5);
  const auto block = tier.try_acquire(content.size());
  REQUIRE(block.has_value());
  std::vector<std::byte> back(content.size());
  const Ticket out = tier.copy_out(*block, content.data(), {});
  tier.copy_in(back.data(), *block, {WaitPoint::kCaller, out})->synchronize();
  CHECK(back == content);
}

TEST_CASE("where io_uring is forbidden threads stand in, and asking for it is an error") {
  constexpr int kMayNotForbid = 77;
  const pid_t child = ::fork();
  if (child == 0) {
    std::array<sock_filter, 4> filter{{
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_io_uring_setup, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    }};
    const sock_fprog program{filter.size(), filter.data()};
    if (::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 && ::prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0) {
      // Its report goes to stderr, and its count of test cases nowhere: they are not to be added to ours.
      ::close(STDOUT_FILENO);
      ::open("/dev/null", O_WRONLY);
      ::execl("/proc/self/exe", "streams_test", "[no_uring]", "--out", "/dev/stderr", static_cast<char*>(nullptr));
    }
    ::_exit(kMayNotForbid);
  }
  int status = 0;
  REQUIRE(::waitpid(child, &status, 0) == child);
  REQUIRE(WIFEXITED(status));
  if (WEXITSTATUS(status) == kMayNotForbid) {
    WARN("SKIPPED: this process may not forbid itself a system call");
    return;
  }
  CHECK(WEXITSTATUS(status) == 0);
}

}  // namespace
}  // namespace ebb

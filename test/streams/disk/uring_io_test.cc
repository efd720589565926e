#include "streams/disk/uring_io.h"

#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <memory>
#include <optional>
#include <system_error>
#include <utility>
#include <vector>

#include <catch2/catch.hpp>

#include "streams/base/host_completion.h"
#include "streams/disk/disk_tier.h"
#include "streams/disk/spill_corrupted.h"
#include "streams/disk/spill_file.h"
#include "test/streams/disk/io_testing.h"

namespace ebb {
namespace {

constexpr std::size_t kChunk = IoJob::kChunkBytes;

// Run by the test below, in a process that may not use io_uring.
TEST_CASE("hidden: where io_uring is forbidden threads stand in, and asking for it is an error", "[.][no_uring]") {
  CHECK(UringIo::refusal() == std::errc::operation_not_permitted);
  CHECK_THROWS_WITH(DiskTier("/var/tmp", std::nullopt, DiskIo::kUring),
                    "io_uring was asked for, but this process may not use it: Operation not permitted");
  DiskTier tier("/var/tmp", std::nullopt, DiskIo::kAuto);
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

// A gate that is open from the second time it is asked on, or waited for. It notes whether another ticket was done
// then.
class Gate final : public Completion {
 public:
  explicit Gate(Ticket other) : other_(std::move(other)) {}
  [[nodiscard]] bool done() const noexcept override {
    if (++asked_ == 2) {
      other_was_done_ = other_->done();
    }
    return asked_ >= 2;
  }
  void synchronize() const override {
    if (asked_ < 2) {
      other_was_done_ = other_->done();
    }
  }
  [[nodiscard]] bool other_was_done() const { return other_was_done_; }

 private:
  const Ticket other_;
  mutable std::atomic<int> asked_{0};
  mutable std::atomic<bool> other_was_done_{false};
};

TEST_CASE("io_uring starts another read before it hashes one, and says that a write is done before it copies another") {
  if (UringIo::refusal()) {
    WARN("SKIPPED: this process may not use io_uring");
    return;
  }
  const IoKind kind = GENERATE(IoKind::kWrite, IoKind::kRead);
  CAPTURE(static_cast<int>(kind));
  SpillFile file("/var/tmp");
  REQUIRE(file.grow(2 * kChunk).has_value());
  const auto queue = std::make_unique<IoQueue>(DiskIo::kUring, file, "ebb-test");
  auto content = random_bytes(2 * kChunk, 12);
  const auto submit = [&](IoKind what, std::size_t offset, const Ticket& after) {
    return queue->submit({what, offset, content.data() + offset, kChunk, {after}});
  };
  submit(IoKind::kWrite, 0, nullptr)->synchronize();
  submit(IoKind::kWrite, kChunk, nullptr)->synchronize();

  const auto both_submitted = std::make_shared<HostCompletion>();
  const Ticket first = submit(kind, 0, both_submitted);
  const auto gate = std::make_shared<Gate>(first);
  const Ticket second = submit(kind, kChunk, gate);  // asked once while the first is in flight, and then to start
  both_submitted->finish(nullptr);
  first->synchronize();
  second->synchronize();
  CHECK(gate->other_was_done() == (kind == IoKind::kWrite));
}

TEST_CASE("a read that is short while as many are in flight as may be ends, and so do the others") {
  if (UringIo::refusal()) {
    WARN("SKIPPED: this process may not use io_uring");
    return;
  }
  constexpr std::size_t kOthers = 2 * UringIo::kDepth * kChunk;
  SpillFile file("/var/tmp");
  REQUIRE(file.grow(kOthers + kChunk).has_value());
  const auto queue = std::make_unique<IoQueue>(DiskIo::kUring, file, "ebb-test");
  auto content = random_bytes(kOthers, 13);
  queue->submit({IoKind::kWrite, 0, content.data(), kOthers, {}})->synchronize();
  queue->submit({IoKind::kWrite, kOthers, content.data(), kChunk, {}})->synchronize();
  REQUIRE(::ftruncate(file.fd(), kOthers + kChunk / 2) == 0);

  std::vector<std::byte> back(kOthers);
  std::vector<std::byte> cut_off(kChunk);
  const auto all_submitted = std::make_shared<HostCompletion>();
  const Ticket is_short = queue->submit({IoKind::kRead, kOthers, cut_off.data(), kChunk, {all_submitted}});
  const Ticket others = queue->submit({IoKind::kRead, 0, back.data(), kOthers, {}});
  all_submitted->finish(nullptr);
  CHECK_THROWS_AS(is_short->synchronize(), SpillCorrupted);
  others->synchronize();
  CHECK(back == content);
}

}  // namespace
}  // namespace ebb

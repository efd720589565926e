// The spill file under a training step: a disk without room, and a file that somebody changes.

#include <fcntl.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cstdint>
#include <filesystem>
#include <string>
#include <system_error>
#include <vector>

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <catch2/catch.hpp>

#include "streams/disk/spill_corrupted.h"
#include "test/checked/fault_plan.h"
#include "test/offload/parity.h"

namespace ebb {
namespace {

constexpr std::uint64_t kStorageBytes = 4096;  // a page: what the spill file grows by at least
constexpr std::uint64_t kStorages = 6;

// Saves kStorages storages of kStorageBytes.
at::Tensor forward(Inputs& in) {
  at::Tensor x = in.activation({32, 32});
  for (std::uint64_t i = 0; i < kStorages; ++i) {
    x = x.sin();
  }
  return x;
}

// No file of this process grows over `bytes` while this lives.
class FileSizeLimit {
 public:
  explicit FileSizeLimit(rlim_t bytes) {
    REQUIRE(::getrlimit(RLIMIT_FSIZE, &before_) == 0);
    rlimit limited = before_;
    limited.rlim_cur = bytes;
    REQUIRE(::setrlimit(RLIMIT_FSIZE, &limited) == 0);
  }
  FileSizeLimit(const FileSizeLimit&) = delete;
  FileSizeLimit& operator=(const FileSizeLimit&) = delete;
  ~FileSizeLimit() { ::setrlimit(RLIMIT_FSIZE, &before_); }

 private:
  rlimit before_{};
};

TEST_CASE_METHOD(NoLeak, "saves that a spill file has no room for stay, are counted, and are exact") {
  const Program program = train(forward, true);
  const Outcome expected = plain(program);
  const std::uint64_t fitting = GENERATE(0, 2, 5);
  CAPTURE(fitting);
  Outcome found;
  Stats stats;
  {
    const FileSizeLimit limit(fitting * kStorageBytes);
    Rig rig(disk());
    found = outcome(program, Run(&rig.offloader()));
    rig.check_empty();
    rig.offloader().reset_stats();
    stats = counted(rig, forward);
  }
  check_same(expected, found);
  CHECK(stats.offloaded.tensors == fitting);
  CHECK(stats.kept_for(KeptReason::kNoRoom).tensors == kStorages - fitting);
  CHECK(stats.kept_for(KeptReason::kNoRoom).bytes == (kStorages - fitting) * kStorageBytes);
}

TEST_CASE_METHOD(NoLeak, "a disk that is full from some moment on keeps what it has and takes no more, and is exact") {
  const Program program = train(forward, true);
  const Outcome expected = plain(program);
  const std::uint64_t nth = GENERATE(1, 2, 3);
  CAPTURE(nth);
  Rig rig(disk());
  const PlannedFault full(FaultPoint::kFallocate, nth, FaultPlan::Extent::kFromThenOn);
  check_same(expected, outcome(program, Run(&rig.offloader())));
  rig.offloader().reset_stats();
  const Stats stats = counted(rig, forward);
  const std::uint64_t kept = nth == 1 ? kStorages : 0;  // the first slab has room for all of them
  CHECK(stats.kept_for(KeptReason::kNoRoom).tensors == kept);
  CHECK(stats.offloaded.tensors == kStorages - kept);
}

// The spill file of this process, as a file of its own: buffered, and with any name that the system gives it.
int open_spill_file() {
  std::vector<std::string> found;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code closed_by_now;
    const std::string target = std::filesystem::read_symlink(entry.path(), closed_by_now);
    if (target.starts_with("/var/tmp/") && target.ends_with(" (deleted)")) {
      found.push_back(entry.path());
    }
  }
  REQUIRE(found.size() == 1);
  const int fd = ::open(found.front().c_str(), O_RDWR | O_CLOEXEC);
  REQUIRE(fd >= 0);
  return fd;
}

// Flips a bit in every page that the step has written.
void damage_spill_file() {
  const int fd = open_spill_file();
  for (std::uint64_t page = 0; page < kStorages; ++page) {
    const auto offset = static_cast<off_t>(page * kStorageBytes + 17);
    char byte = 0;
    REQUIRE(::pread(fd, &byte, 1, offset) == 1);
    byte = static_cast<char>(byte ^ 1);
    REQUIRE(::pwrite(fd, &byte, 1, offset) == 1);
  }
  ::close(fd);
}

TEST_CASE_METHOD(NoLeak, "a changed spill file ends backward with SpillCorrupted, never with other gradients") {
  Setting setting = disk();
  setting.options.disk_io = GENERATE(DiskIo::kAuto, DiskIo::kThreads);
  const Program program = train(forward, true);
  const Outcome expected = plain(program);
  Rig rig(setting);
  for (int step = 0; step < 2; ++step) {
    {
      Inputs in;
      at::Tensor loss;
      {
        const OffloadGuard guard(rig.offloader());
        loss = forward(in).sum();
      }
      rig.offloader().drain();
      damage_spill_file();
      CHECK_THROWS_AS(loss.backward(), SpillCorrupted);
      for (const at::Tensor& gradient : in.gradients()) {
        CHECK_FALSE(gradient.defined());
      }
    }
    rig.check_empty();
    check_same(expected, outcome(program, Run(&rig.offloader())));
    rig.check_empty();
  }
}

}  // namespace
}  // namespace ebb

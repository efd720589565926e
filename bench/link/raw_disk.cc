#include "bench/link/raw_disk.h"

#include <liburing.h>
#include <linux/magic.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <future>
#include <stdexcept>
#include <string>
#include <system_error>
#include <vector>

#include "offload/base/human_bytes.h"

namespace ebb {
namespace {

class Ring {
 public:
  explicit Ring(unsigned entries) {
    const int result = ::io_uring_queue_init(entries, &ring_, 0);
    if (result < 0) {
      throw std::system_error(-result, std::generic_category(), "cannot make an io_uring");
    }
  }
  Ring(const Ring&) = delete;
  Ring& operator=(const Ring&) = delete;
  ~Ring() { ::io_uring_queue_exit(&ring_); }
  [[nodiscard]] io_uring* get() { return &ring_; }

 private:
  io_uring ring_{};
};

// A transfer is whole or it failed: in the midst of a file that is preallocated, direct I/O moves no part of a block.
void check_transfer(const DiskLoad& load, std::int64_t moved, int error) {
  if (moved != static_cast<std::int64_t>(load.block_bytes)) {
    throw std::system_error(moved < 0 ? error : EIO, std::generic_category(),
                            std::string("cannot ") + (load.kind == IoKind::kRead ? "read " : "write ") +
                                std::to_string(load.block_bytes) + " bytes of the raw file");
  }
}

template <typename Pass>
double time_gb_per_s(std::uint64_t bytes, const Pass& pass) {
  const auto start = std::chrono::steady_clock::now();
  pass();
  const std::chrono::duration<double, std::nano> ns = std::chrono::steady_clock::now() - start;
  return static_cast<double>(bytes) / ns.count();
}

}  // namespace

RawDisk::RawDisk(const std::filesystem::path& folder, std::uint64_t file_bytes, std::span<std::byte> memory)
    : file_(folder), file_bytes_(file_bytes), memory_(memory) {
  struct statfs system {};
  const bool in_memory = ::fstatfs(file_.fd(), &system) == 0 && system.f_type == TMPFS_MAGIC;
  if (in_memory || !file_.direct()) {  // tmpfs takes the flag for direct I/O, and is all page cache
    throw std::runtime_error("the file system of " + folder.string() +
                             (in_memory ? " is memory" : " has no direct I/O") +
                             ": no disk's rate can be measured there");
  }
  if (!file_.grow(file_bytes)) {
    throw std::runtime_error("there is no room for a file of " + human_bytes(file_bytes) + " in " + folder.string());
  }
}

double RawDisk::uring_gb_per_s(const DiskLoad& load) const {
  Ring ring(load.in_flight);
  std::uint64_t next = 0;
  const auto prepare_next = [&] {
    if (next == file_bytes_) {
      return;
    }
    io_uring_sqe* const sqe = ::io_uring_get_sqe(ring.get());  // as many entries as can be in flight: there is one
    const auto bytes = static_cast<unsigned>(load.block_bytes);
    if (load.kind == IoKind::kRead) {
      ::io_uring_prep_read(sqe, file_.fd(), memory_of(next), bytes, next);
    } else {
      ::io_uring_prep_write(sqe, file_.fd(), memory_of(next), bytes, next);
    }
    next += load.block_bytes;
  };
  return time_gb_per_s(file_bytes_, [&] {
    for (unsigned i = 0; i < load.in_flight; ++i) {
      prepare_next();
    }
    for (std::uint64_t done = 0; done < file_bytes_;) {
      const int submitted = ::io_uring_submit_and_wait(ring.get(), 1);
      if (submitted < 0 && submitted != -EINTR) {
        throw std::system_error(-submitted, std::generic_category(), "cannot submit to an io_uring");
      }
      io_uring_cqe* cqe = nullptr;
      while (::io_uring_peek_cqe(ring.get(), &cqe) == 0) {
        check_transfer(load, cqe->res, -cqe->res);
        ::io_uring_cqe_seen(ring.get(), cqe);
        done += load.block_bytes;
        prepare_next();
      }
    }
  });
}

double RawDisk::threads_gb_per_s(const DiskLoad& load) const {
  std::atomic<std::uint64_t> next{0};
  const auto work = [&] {
    for (std::uint64_t at = next.fetch_add(load.block_bytes); at < file_bytes_; at = next.fetch_add(load.block_bytes)) {
      const auto offset = static_cast<off_t>(at);
      const ssize_t moved = load.kind == IoKind::kRead ? ::pread(file_.fd(), memory_of(at), load.block_bytes, offset)
                                                       : ::pwrite(file_.fd(), memory_of(at), load.block_bytes, offset);
      check_transfer(load, moved, errno);
    }
  };
  return time_gb_per_s(file_bytes_, [&] {
    std::vector<std::future<void>> threads;
    for (unsigned i = 0; i < load.in_flight; ++i) {
      threads.push_back(std::async(std::launch::async, work));
    }
    for (std::future<void>& thread : threads) {
      thread.get();
    }
  });
}

std::byte* RawDisk::memory_of(std::uint64_t file_offset) const { return memory_.data() + file_offset % memory_.size(); }

}  // namespace ebb

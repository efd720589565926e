#include "streams/disk/mmap_allocator.h"

#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <limits>
#include <random>
#include <span>
#include <thread>
#include <utility>
#include <vector>

#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>
#include <catch2/catch.hpp>

#include "streams/base/aligned_memory.h"
#include "test/streams/disk/io_testing.h"

C10_DECLARE_bool(caffe2_cpu_allocator_do_zero_fill);

namespace ebb {
namespace {

constexpr std::size_t kLeast = MmapAllocator::kLeastBytes;

std::uint64_t resident_bytes() {
  std::uint64_t mapped_pages = 0;
  std::uint64_t resident_pages = 0;
  std::ifstream("/proc/self/statm") >> mapped_pages >> resident_pages;
  return resident_pages * static_cast<std::uint64_t>(sysconf(_SC_PAGESIZE));
}

// Not touched, so that they take addresses and no memory.
std::vector<c10::DataPtr> allocate_blocks(std::size_t count, std::size_t bytes) {
  std::vector<c10::DataPtr> blocks(count);
  for (c10::DataPtr& block : blocks) {
    block = MmapAllocator::instance().allocate(bytes);
  }
  return blocks;
}

}  // namespace

TEST_CASE("freed blocks go back to the system but for a bounded cache") {
  const auto before = MmapAllocator::instance().bytes();
  auto blocks = allocate_blocks(300, kMiB);
  for (const c10::DataPtr& block : blocks) {
    std::memset(block.get(), 1, kMiB);
  }
  CHECK(MmapAllocator::instance().bytes().in_use == before.in_use + 300 * kMiB);
  const std::uint64_t most = resident_bytes();
  for (std::size_t i = 0; i < blocks.size(); i += 2) {  // with holes
    blocks[i].clear();
  }
  CHECK(resident_bytes() + 80 * kMiB <= most);  // 150 MiB but for 64
  blocks.clear();
  CHECK(resident_bytes() + 230 * kMiB <= most);
  CHECK(MmapAllocator::instance().bytes().in_use == before.in_use);
  CHECK(MmapAllocator::instance().bytes().cached <= MmapAllocator::kCacheBytes);
}

TEST_CASE("the cache may grow with what is in use, up to a number of blocks") {
  const auto held = allocate_blocks(1200, 4 * kMiB);
  static_cast<void>(allocate_blocks(320, kMiB));
  CHECK(MmapAllocator::instance().bytes().cached == held.size() * 4 * kMiB / MmapAllocator::kCachePart);
  static_cast<void>(allocate_blocks(2 * MmapAllocator::kCacheBlocks, kLeast));
  CHECK(MmapAllocator::instance().bytes().cached == MmapAllocator::kCacheBlocks * kLeast);
}

TEST_CASE("a freed block serves the next request of its pages, and no other") {
  MmapAllocator& allocator = MmapAllocator::instance();
  c10::DataPtr first = allocator.allocate(3 * kMiB);
  void* const address = first.get();
  first.clear();
  const c10::DataPtr other = allocator.allocate(3 * kMiB + kPageBytes);
  CHECK(other.get() != address);
  const std::uint64_t cached = allocator.bytes().cached;
  const c10::DataPtr same = allocator.allocate(3 * kMiB - 1);
  CHECK(same.get() == address);
  CHECK(allocator.bytes().cached == cached - 3 * kMiB);
}

TEST_CASE("large blocks lie on a page, small ones are LibTorch's, and all are freed by the raw deleter") {
  MmapAllocator& allocator = MmapAllocator::instance();
  const std::size_t bytes = GENERATE(std::size_t{0}, std::size_t{1}, kLeast - 1, kLeast, kLeast + 1, 5 * kMiB);
  const std::uint64_t in_use = allocator.bytes().in_use;
  const std::uint64_t mapped = bytes < kLeast ? 0 : round_up_to_page(bytes);
  void* const data = allocator.raw_allocate(bytes);
  CHECK(allocator.bytes().in_use == in_use + mapped);
  CHECK((bytes < kLeast || is_aligned(data, kPageBytes)));
  CHECK((data != nullptr || bytes == 0));
  if (bytes != 0) {
    std::memset(data, 1, bytes);
  }
  allocator.raw_deallocate(data);
  CHECK(allocator.bytes().in_use == in_use);

  const c10::DataPtr pointer = allocator.allocate(bytes);
  CHECK(pointer.get_deleter() == allocator.raw_deleter());
  CHECK(allocator.is_simple_data_ptr(pointer));
  CHECK(pointer.device() == c10::Device(c10::kCPU));
}

TEST_CASE("where LibTorch is told to fill memory with zeros, a block that was used before is filled, too") {
  MmapAllocator& allocator = MmapAllocator::instance();
  {
    const c10::DataPtr used = allocator.allocate(kMiB);
    std::memset(used.get(), 1, kMiB);
  }
  FLAGS_caffe2_cpu_allocator_do_zero_fill = true;
  const c10::DataPtr filled = allocator.allocate(kMiB);
  FLAGS_caffe2_cpu_allocator_do_zero_fill = false;
  CHECK(std::ranges::count(std::span(static_cast<const char*>(filled.get()), kMiB), 0) == kMiB);
}

TEST_CASE("a clone has the same bytes") {
  const c10::DataPtr block = MmapAllocator::instance().allocate(kMiB);
  const std::vector<std::byte> content = random_bytes(kMiB, 1);
  std::memcpy(block.get(), content.data(), kMiB);
  const c10::DataPtr clone = MmapAllocator::instance().clone(block.get(), kMiB);
  CHECK(std::memcmp(clone.get(), content.data(), kMiB) == 0);
}

TEST_CASE("a request that the system cannot map is LibTorch's own error, and takes nothing") {
  const std::uint64_t in_use = MmapAllocator::instance().bytes().in_use;
  const std::size_t most = std::numeric_limits<std::size_t>::max();
  const std::size_t bytes = GENERATE_COPY(std::size_t{1} << 60, most / 2 + 1, most - 1);
  CHECK_THROWS_AS(MmapAllocator::instance().allocate(bytes), c10::Error);
  CHECK(MmapAllocator::instance().bytes().in_use == in_use);
}

TEST_CASE("threads that allocate and free at once, each other's blocks too, get memory of their own") {
  const std::uint64_t in_use = MmapAllocator::instance().bytes().in_use;
  constexpr int kThreads = 4;
  std::atomic<int> wrong = 0;
  std::vector<c10::DataPtr> left(kThreads);
  const auto work = [&](int self) {
    std::mt19937 random(static_cast<unsigned>(self));
    std::vector<std::pair<c10::DataPtr, std::size_t>> held(8);
    for (int i = 0; i < 2000; ++i) {
      auto& [block, bytes] = held[random() % held.size()];
      const auto mark = static_cast<unsigned char>(self + 1);
      if (block) {
        const auto* const data = static_cast<const unsigned char*>(block.get());
        wrong += data[0] == mark && data[bytes - 1] == mark ? 0 : 1;
      }
      bytes = kLeast - kPageBytes + (random() % 8) * kPageBytes;
      block = MmapAllocator::instance().allocate(bytes);
      auto* const data = static_cast<unsigned char*>(block.get());
      data[0] = mark;
      data[bytes - 1] = mark;
    }
    left[static_cast<std::size_t>(self)] = std::move(held[0].first);  // for another thread to free
  };
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i) {
    threads.emplace_back(work, i);
  }
  for (auto& thread : threads) {
    thread.join();
  }
  left.clear();
  CHECK(wrong == 0);
  CHECK(MmapAllocator::instance().bytes().in_use == in_use);
}

TEST_CASE("a child that is forked while another thread allocates can allocate and free") {
  std::atomic<bool> over = false;
  std::thread busy([&] {
    while (!over) {
      static_cast<void>(MmapAllocator::instance().allocate(kMiB));
    }
  });
  c10::DataPtr parents = MmapAllocator::instance().allocate(kMiB);
  int failed = 0;
  for (int i = 0; i < 200; ++i) {
    const pid_t child = fork();
    REQUIRE(child >= 0);
    if (child == 0) {
      alarm(20);
      parents.clear();
      static_cast<void>(MmapAllocator::instance().allocate(kMiB));
      _exit(0);
    }
    int status = 0;
    REQUIRE(waitpid(child, &status, 0) == child);
    failed += status == 0 ? 0 : 1;
  }
  over = true;
  busy.join();
  CHECK(failed == 0);
}

}  // namespace ebb

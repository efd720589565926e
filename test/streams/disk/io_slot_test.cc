#include "streams/disk/io_slot.h"

#include <cerrno>
#include <cstddef>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include <catch2/catch.hpp>

#include "streams/base/aligned_memory.h"
#include "streams/disk/io_job.h"
#include "streams/disk/io_queue.h"
#include "streams/disk/spill_corrupted.h"
#include "streams/disk/spill_file.h"
#include "test/streams/disk/io_testing.h"

namespace ebb {
namespace {

TEST_CASE("a slot goes on after a short or interrupted transfer and ends at an error") {
  const SpillFile file("/var/tmp");
  const AlignedMemory memory = allocate_pages(4 * kPageBytes);
  auto job = std::make_shared<IoJob>(IoRequest{IoKind::kWrite, 8 * kPageBytes, memory.get(), 4 * kPageBytes, {}});
  const Ticket ticket = job;
  IoSlot slot(file);
  slot.start(job, *job->next_chunk());
  CHECK_FALSE(job->next_chunk().has_value());
  CHECK(slot.bytes() == 4 * kPageBytes);
  auto* const start = static_cast<std::byte*>(slot.data());

  slot.advance(kPageBytes);
  slot.advance(-EINTR);
  slot.advance(-EAGAIN);
  REQUIRE(slot.busy());
  CHECK(slot.data() == start + kPageBytes);
  CHECK(slot.bytes() == 3 * kPageBytes);
  CHECK(slot.file_offset() == 9 * kPageBytes);
  CHECK_FALSE(ticket->done());

  SECTION("the rest arrives") {
    slot.advance(3 * kPageBytes);
    CHECK_FALSE(slot.busy());
    CHECK(error_of(ticket) == "no error");
  }
  SECTION("the disk is full") {
    slot.advance(-ENOSPC);
    CHECK_FALSE(slot.busy());
    CHECK(error_of(ticket) ==
          "cannot write 12288 bytes at offset 36864 of the spill file in /var/tmp: No space left on device");
  }
}

TEST_CASE("direct I/O goes on at a page, and a file that ends within one is an error") {
  const SpillFile file("/var/tmp");
  if (!file.direct()) {
    WARN("SKIPPED: no direct I/O in /var/tmp");
    return;
  }
  file.checksums().add(0, 4 * kPageBytes, 1);
  const AlignedMemory memory = allocate_pages(4 * kPageBytes);
  auto job = std::make_shared<IoJob>(IoRequest{IoKind::kRead, 0, memory.get(), 4 * kPageBytes, {}});
  const Ticket ticket = job;
  IoSlot slot(file);
  slot.start(job, *job->next_chunk());
  slot.advance(kPageBytes + 512);
  REQUIRE(slot.busy());
  CHECK(slot.file_offset() == kPageBytes);
  CHECK(slot.data() == memory.get() + kPageBytes);
  slot.advance(512);
  CHECK_FALSE(slot.busy());
  CHECK_THROWS_AS(ticket->synchronize(), SpillCorrupted);
  CHECK(error_of(ticket) ==
        "cannot read 12288 bytes at offset 4096 of the spill file in /var/tmp: the file ends there");
}

//   write starts | the source is changed, as autograd allows | the bytes reach the file | read: what was there at first
TEST_CASE("a source that changes while it is written is no corruption, and the file has it as it was") {
  SpillFile file("/var/tmp");
  REQUIRE(file.grow(IoJob::kChunkBytes).has_value());
  const std::size_t bytes = GENERATE(std::size_t{1}, kPageBytes - 1, 3 * kPageBytes, IoJob::kChunkBytes);
  const AlignedMemory source = allocate_pages(bytes);
  const auto content = random_bytes(bytes, 8);
  std::memcpy(source.get(), content.data(), bytes);
  auto job = std::make_shared<IoJob>(IoRequest{IoKind::kWrite, 0, source.get(), bytes, {}});
  const Ticket written = job;
  IoSlot slot(file);
  slot.start(job, *job->next_chunk());
  REQUIRE(slot.busy());
  std::memset(source.get(), 0, bytes);
  slot.finish_blocking();
  written->synchronize();

  const AlignedMemory back = allocate_pages(bytes);
  const auto queue = std::make_unique<IoQueue>(DiskIo::kThreads, file, "ebb-test");
  queue->submit({IoKind::kRead, 0, back.get(), bytes, {}})->synchronize();
  CHECK(std::memcmp(back.get(), content.data(), bytes) == 0);
}

TEST_CASE("a request with several chunks is done with the last of them and reports the first error") {
  std::vector<std::byte> memory(2 * IoJob::kChunkBytes + 1);
  const auto job = std::make_shared<IoJob>(IoRequest{IoKind::kRead, 0, memory.data(), memory.size(), {}});
  REQUIRE(job->next_chunk()->bytes == IoJob::kChunkBytes);
  REQUIRE(job->next_chunk()->bytes == IoJob::kChunkBytes);
  REQUIRE(job->next_chunk()->bytes == 1);
  job->finish_chunk(nullptr);
  job->finish_chunk(std::make_exception_ptr(std::runtime_error("first")));
  CHECK_FALSE(job->done());
  job->finish_chunk(std::make_exception_ptr(std::runtime_error("second")));
  CHECK(error_of(job) == "first");
}

}  // namespace
}  // namespace ebb

#include "streams/disk/io_queue.h"

#include <unistd.h>

#include <atomic>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include <c10/util/Exception.h>
#include <catch2/catch.hpp>

#include "streams/base/aligned_memory.h"
#include "streams/base/host_completion.h"
#include "streams/disk/spill_corrupted.h"
#include "streams/disk/spill_file.h"
#include "test/streams/disk/io_testing.h"

namespace ebb {
namespace {

constexpr std::byte kGuard{0xEB};

Ticket write(IoQueue& queue, std::uint64_t offset, const void* from, std::size_t bytes,
             std::vector<Ticket> after = {}) {
  return queue.submit({IoKind::kWrite, offset, const_cast<void*>(from), bytes, std::move(after)});
}

Ticket read(IoQueue& queue, std::uint64_t offset, void* to, std::size_t bytes, std::vector<Ticket> after = {}) {
  return queue.submit({IoKind::kRead, offset, to, bytes, std::move(after)});
}

std::vector<std::byte> read_back(IoQueue& queue, std::uint64_t offset, std::size_t bytes) {
  std::vector<std::byte> content(bytes, kGuard);
  read(queue, offset, content.data(), bytes)->synchronize();
  return content;
}

struct Disk {
  explicit Disk(DiskIo engine, std::size_t bytes) {
    REQUIRE(file.grow(bytes).has_value());
    queue = std::make_unique<IoQueue>(engine, file, "ebb-test");
  }
  SpillFile file{"/var/tmp"};
  std::unique_ptr<IoQueue> queue;
};

TEST_CASE("bytes come back exactly, whatever their number and alignment, and nothing around them changes") {
  const DiskIo engine = each_engine();
  const std::size_t bytes = GENERATE(std::size_t{1}, std::size_t{4095}, std::size_t{4096}, std::size_t{4097},
                                     4 * kMiB - 1, 4 * kMiB, 4 * kMiB + 1, 13 * kMiB);
  const std::size_t misalignment = GENERATE(0, 1, 64, 512);
  CAPTURE(static_cast<int>(engine), bytes, misalignment);
  const std::size_t before = kPageBytes;  // a neighbour's page on either side
  const std::size_t after = before + round_up_to_page(bytes);
  Disk disk(engine, after + kPageBytes);

  const auto neighbour = random_bytes(kPageBytes, 1);
  write(*disk.queue, 0, neighbour.data(), kPageBytes)->synchronize();
  write(*disk.queue, after, neighbour.data(), kPageBytes)->synchronize();

  const AlignedMemory source = allocate_pages(bytes + misalignment);
  const auto expected = random_bytes(bytes, 2);
  std::memcpy(source.get() + misalignment, expected.data(), bytes);
  const Ticket written = write(*disk.queue, before, source.get() + misalignment, bytes);

  const AlignedMemory destination = allocate_pages(misalignment + bytes + kPageBytes);
  std::memset(destination.get(), static_cast<int>(kGuard), misalignment + bytes + kPageBytes);
  read(*disk.queue, before, destination.get() + misalignment, bytes, {written})->synchronize();

  CHECK(std::memcmp(destination.get() + misalignment, expected.data(), bytes) == 0);
  for (std::size_t i = 0; i < misalignment; ++i) {
    REQUIRE(destination[i] == kGuard);
  }
  for (std::size_t i = misalignment + bytes; i < misalignment + bytes + kPageBytes; ++i) {
    REQUIRE(destination[i] == kGuard);
  }
  CHECK(read_back(*disk.queue, 0, kPageBytes) == neighbour);
  CHECK(read_back(*disk.queue, after, kPageBytes) == neighbour);
}

TEST_CASE("a block that ends within a page leaves no bytes of another block behind its end on the disk") {
  const DiskIo engine = each_engine();
  Disk disk(engine, 20 * kPageBytes);
  const auto secret = random_bytes(kPageBytes - 1, 3);
  for (std::uint64_t page = 0; page < 16; ++page) {  // every slot's bounce buffer has held the secret
    write(*disk.queue, page * kPageBytes, secret.data(), secret.size())->synchronize();
  }
  const std::byte one{1};
  write(*disk.queue, 0, &one, 1)->synchronize();
  std::vector<std::byte> expected(kPageBytes);
  expected[0] = one;
  const AlignedMemory on_disk = allocate_pages(kPageBytes);  // behind the queue's back, which reads only what it wrote
  REQUIRE(::pread(disk.file.fd(), on_disk.get(), kPageBytes, 0) == static_cast<ssize_t>(kPageBytes));
  CHECK(std::vector<std::byte>(on_disk.get(), on_disk.get() + kPageBytes) == expected);
}

TEST_CASE("a request starts only when what it comes after is done") {
  const DiskIo engine = each_engine();
  Disk disk(engine, 9 * kMiB);
  const auto early = random_bytes(9 * kMiB, 4);
  const auto late = random_bytes(9 * kMiB, 5);
  auto source = early;
  const auto gate = std::make_shared<HostCompletion>();
  const auto second_gate = std::make_shared<HostCompletion>();

  const Ticket written = write(*disk.queue, 0, source.data(), source.size(), {nullptr, gate, second_gate});
  gate->finish(nullptr);
  std::this_thread::sleep_for(kLongEnough);
  CHECK_FALSE(written->done());
  source = late;  // had the write started, the file would have the early bytes
  second_gate->finish(nullptr);
  written->synchronize();
  CHECK(read_back(*disk.queue, 0, late.size()) == late);
}

TEST_CASE("requests start in the order in which they were submitted") {
  const DiskIo engine = each_engine();
  Disk disk(engine, 8 * kMiB);
  const auto content = random_bytes(4 * kMiB, 6);
  const auto gate = std::make_shared<HostCompletion>();
  const Ticket first = write(*disk.queue, 0, content.data(), content.size(), {gate});
  const Ticket second = write(*disk.queue, 4 * kMiB, content.data(), content.size());
  std::this_thread::sleep_for(kLongEnough);
  CHECK_FALSE(second->done());
  gate->finish(nullptr);
  first->synchronize();
  second->synchronize();
}

TEST_CASE("a read whose predecessor failed fails with the same error and moves nothing, a write goes on") {
  const DiskIo engine = each_engine();
  Disk disk(engine, 2 * kMiB);
  const auto content = random_bytes(kMiB, 7);
  const auto failed = std::make_shared<HostCompletion>();
  const Ticket written = write(*disk.queue, 0, content.data(), content.size(), {failed});
  std::vector<std::byte> untouched(kMiB);
  const Ticket never_read = disk.queue->submit(
      {.kind = IoKind::kRead, .file_offset = 0, .memory = untouched.data(), .bytes = kMiB, .after = {failed}});
  failed->finish(std::make_exception_ptr(std::runtime_error("the copy before it failed")));
  CHECK_THROWS_WITH(never_read->synchronize(), "the copy before it failed");
  CHECK(untouched == std::vector<std::byte>(kMiB));
  written->synchronize();
  CHECK(read_back(*disk.queue, 0, content.size()) == content);
}

TEST_CASE("a failed write is reported at every synchronize, with its bytes, offset and folder") {
  const DiskIo engine = each_engine();
  Disk disk(engine, kMiB);
  const auto content = random_bytes(2 * IoJob::kChunkBytes, 9);
  const std::uint64_t nowhere = std::uint64_t{1} << 63;  // no file has such an offset
  const Ticket ticket = write(*disk.queue, nowhere, content.data(), content.size());
  const std::string first = "cannot write " + std::to_string(IoJob::kChunkBytes) + " bytes at offset 92233720368";
  const std::string last = "of the spill file in /var/tmp: Invalid argument";
  for (int i = 0; i < 3; ++i) {
    CHECK_THROWS_AS(ticket->synchronize(), std::system_error);
    CHECK_THAT(error_of(ticket), Catch::Contains(first) && Catch::EndsWith(last));
  }
  CHECK(ticket->done());
  write(*disk.queue, 0, content.data(), kMiB)->synchronize();  // the queue goes on
}

TEST_CASE("a read beyond the end of the file is an error and not a wait") {
  const DiskIo engine = each_engine();
  Disk disk(engine, kPageBytes);
  std::vector<std::byte> destination(2 * kPageBytes);
  write(*disk.queue, 0, destination.data(), destination.size())->synchronize();
  REQUIRE(::ftruncate(disk.file.fd(), kPageBytes) == 0);
  const Ticket ticket = read(*disk.queue, 0, destination.data(), destination.size());
  CHECK_THROWS_AS(ticket->synchronize(), SpillCorrupted);
  CHECK_THAT(error_of(ticket), Catch::StartsWith("cannot read 4096 bytes at offset 4096 of the spill file in /var/tmp: "
                                                 "the file ends there"));
}

TEST_CASE("a queue that is destroyed first finishes what was submitted, gated requests too") {
  const DiskIo engine = each_engine();
  constexpr std::size_t kRequests = 6;
  const auto content = random_bytes(5 * kMiB, 10);
  std::vector<Ticket> tickets;
  Disk disk(engine, kRequests * content.size() + kPageBytes);
  const auto gate = std::make_shared<HostCompletion>();
  for (std::size_t i = 0; i < kRequests; ++i) {
    tickets.push_back(
        write(*disk.queue, i * content.size(), content.data(), content.size(), {i == 3 ? gate : nullptr}));
  }
  std::thread opener([&gate] {
    std::this_thread::sleep_for(kLongEnough);
    gate->finish(nullptr);
  });
  disk.queue.reset();
  for (const Ticket& ticket : tickets) {
    CHECK(ticket->done());
  }
  opener.join();
  const auto again = std::make_unique<IoQueue>(engine, disk.file, "ebb-test");
  for (std::size_t i = 0; i < kRequests; ++i) {
    CHECK(read_back(*again, i * content.size(), content.size()) == content);
  }
}

TEST_CASE("two queues whose requests wait for one another's do not stop each other") {
  const DiskIo engine = each_engine();
  Disk disk(engine, 2 * kMiB);
  const auto other = std::make_unique<IoQueue>(engine, disk.file, "ebb-other");
  auto buffer = random_bytes(kMiB, 11);
  const auto expected = buffer;
  Ticket last;
  for (int i = 0; i < 200; ++i) {  // the same bytes, back and forth
    last = write(*disk.queue, 0, buffer.data(), buffer.size(), {last});
    last = read(*other, 0, buffer.data(), buffer.size(), {last});
  }
  last->synchronize();
  CHECK(buffer == expected);
}

TEST_CASE("many threads may submit to one queue") {
  const DiskIo engine = each_engine();
  constexpr std::size_t kThreads = 4;
  constexpr std::size_t kRequests = 50;
  constexpr std::size_t kStride = 24 * kPageBytes;
  Disk disk(engine, kThreads * kRequests * kStride);
  std::atomic<int> wrong = 0;
  std::vector<std::thread> threads;
  for (std::size_t t = 0; t < kThreads; ++t) {
    threads.emplace_back([&disk, &wrong, t] {
      for (std::size_t i = 0; i < kRequests; ++i) {
        const std::uint64_t offset = (t * kRequests + i) * kStride;
        const auto content = random_bytes(kStride - i * 31, static_cast<unsigned>(offset));
        std::vector<std::byte> back(content.size());
        const Ticket written = write(*disk.queue, offset, content.data(), content.size());
        read(*disk.queue, offset, back.data(), back.size(), {written})->synchronize();
        wrong += back == content ? 0 : 1;
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  CHECK(wrong == 0);
}

TEST_CASE("a request that breaks the rules is refused when it is submitted") {
  const DiskIo engine = each_engine();
  Disk disk(engine, kMiB);
  std::byte byte{};
  CHECK_THROWS_AS(write(*disk.queue, 0, &byte, 0), c10::Error);
  CHECK_THROWS_AS(write(*disk.queue, 0, nullptr, 1), c10::Error);
  CHECK_THROWS_AS(write(*disk.queue, 512, &byte, 1), c10::Error);
}

}  // namespace
}  // namespace ebb

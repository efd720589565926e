// Whatever happens to the spill file behind our back: no byte of it is taken for what was written.

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <thread>
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

constexpr std::size_t kRoom = 3 * kPageBytes;  // of a block

struct WrittenBlock {
  std::uint64_t offset;
  std::vector<std::byte> content;
  std::vector<std::byte> back;
};

enum class Found { kIntact, kCorrupted, kWrong };

// Blocks in a spill file, and the file's bytes as the system has them.
class Victim {
 public:
  Victim(DiskIo engine, std::size_t blocks) : image_bytes_(blocks * kRoom) {
    REQUIRE(file_.grow(image_bytes_).has_value());
    out_ = std::make_unique<IoQueue>(engine, file_, "ebb-out");
    in_ = std::make_unique<IoQueue>(engine, file_, "ebb-in");
    std::mt19937 random(1);
    std::vector<Ticket> written;
    for (std::size_t i = 0; i < blocks; ++i) {
      const std::size_t bytes = 1 + random() % kRoom;
      blocks_.push_back({i * kRoom, random_bytes(bytes, static_cast<unsigned>(i)), std::vector<std::byte>(bytes)});
      written.push_back(out_->submit({IoKind::kWrite, i * kRoom, blocks_.back().content.data(), bytes, {}}));
    }
    for (const Ticket& ticket : written) {
      ticket->synchronize();
    }
    image_ = allocate_pages(image_bytes_);
    REQUIRE(::pread(file_.fd(), image_.get(), image_bytes_, 0) == static_cast<ssize_t>(image_bytes_));
    changed_ = allocate_pages(image_bytes_);
    forget_changes();
  }

  [[nodiscard]] const std::vector<WrittenBlock>& blocks() const { return blocks_; }
  [[nodiscard]] std::size_t file_bytes() const { return image_bytes_; }

  // The file's bytes, to be changed.
  [[nodiscard]] std::byte* bytes() { return changed_.get(); }
  void forget_changes() { std::memcpy(changed_.get(), image_.get(), image_bytes_); }

  [[nodiscard]] bool is_changed(const WrittenBlock& block) const {
    return std::memcmp(changed_.get() + block.offset, block.content.data(), block.content.size()) != 0;
  }

  void store() const {
    REQUIRE(::pwrite(file_.fd(), changed_.get(), image_bytes_, 0) == static_cast<ssize_t>(image_bytes_));
  }
  void cut(std::size_t bytes) const { REQUIRE(::ftruncate(file_.fd(), static_cast<off_t>(bytes)) == 0); }

  // Reads all blocks at once.
  [[nodiscard]] std::vector<Found> read_all() {
    std::vector<Ticket> tickets;
    for (WrittenBlock& block : blocks_) {
      std::fill(block.back.begin(), block.back.end(), std::byte{0xEB});
      tickets.push_back(in_->submit({IoKind::kRead, block.offset, block.back.data(), block.back.size(), {}}));
    }
    std::vector<Found> found;
    for (std::size_t i = 0; i < blocks_.size(); ++i) {
      try {
        tickets[i]->synchronize();
        found.push_back(blocks_[i].back == blocks_[i].content ? Found::kIntact : Found::kWrong);
      } catch (const SpillCorrupted&) {
        found.push_back(Found::kCorrupted);
      }
    }
    return found;
  }

 private:
  const std::size_t image_bytes_;
  SpillFile file_{"/var/tmp"};
  std::unique_ptr<IoQueue> out_;
  std::unique_ptr<IoQueue> in_;
  std::vector<WrittenBlock> blocks_;
  AlignedMemory image_;
  AlignedMemory changed_;
};

// Damages the block in one of the ways in which files get damaged; at least one bit of it differs afterwards.
void damage(Victim& victim, const WrittenBlock& block, std::mt19937& random) {
  std::byte* const start = victim.bytes() + block.offset;
  std::byte& victim_byte = start[random() % block.content.size()];
  const auto flipped_bit = std::byte{1} << (random() % 8);
  std::byte* const other = victim.bytes() + random() % (victim.file_bytes() / kPageBytes) * kPageBytes;
  switch (random() % 8) {
    case 0:  // a page that was never written
      std::memset(start, 0, kPageBytes);
      break;
    case 1:  // a page that was meant for another place
      std::memmove(start, other, kPageBytes);
      break;
    case 2:
      victim_byte = static_cast<std::byte>(random());
      break;
    default:
      victim_byte ^= flipped_bit;
  }
  if (!victim.is_changed(block)) {
    victim_byte ^= flipped_bit;
  }
}

TEST_CASE("10,000 damaged blocks of a spill file are all detected, and the blocks beside them come back") {
  constexpr std::size_t kDamages = 10'000;
  Victim victim(each_engine(), 128);
  std::mt19937 random(2);
  std::size_t damages = 0;
  std::size_t detected = 0;
  while (damages < kDamages) {
    victim.forget_changes();
    std::vector<Found> expected;
    for (const WrittenBlock& block : victim.blocks()) {
      const bool hit = random() % 8 != 0;
      if (hit) {
        damage(victim, block, random);
      }
      expected.push_back(hit ? Found::kCorrupted : Found::kIntact);
      damages += hit ? 1 : 0;
    }
    victim.store();
    const std::vector<Found> found = victim.read_all();
    detected += static_cast<std::size_t>(std::count(found.begin(), found.end(), Found::kCorrupted));
    REQUIRE(found == expected);
  }
  CHECK(detected == damages);
  victim.forget_changes();
  victim.store();
  CHECK(victim.read_all() == std::vector<Found>(victim.blocks().size(), Found::kIntact));
}

TEST_CASE("a spill file that is cut, also within a page, or filled up with zeros, is detected where it is cut") {
  Victim victim(each_engine(), 128);
  std::mt19937 random(3);
  for (int round = 0; round < 40; ++round) {
    const std::size_t kept = random() % victim.file_bytes();
    victim.cut(kept);
    if (round % 2 == 1) {
      victim.cut(victim.file_bytes());
    }
    std::vector<Found> expected;
    for (const WrittenBlock& block : victim.blocks()) {
      // Direct reads are of whole pages, and the rest of a block's last page holds nothing: it may be missing.
      const bool whole = block.offset + block.content.size() <= kept;
      expected.push_back(whole ? Found::kIntact : Found::kCorrupted);
    }
    const std::vector<Found> found = victim.read_all();
    for (std::size_t i = 0; i < found.size(); ++i) {
      const WrittenBlock& block = victim.blocks()[i];
      const bool cut_behind_the_end = expected[i] == Found::kIntact && block.offset + kRoom > kept;
      CAPTURE(round, kept, block.offset, block.content.size());
      CHECK((found[i] == expected[i] || (cut_behind_the_end && found[i] == Found::kCorrupted)));
    }
    victim.store();
  }
  CHECK(victim.read_all() == std::vector<Found>(victim.blocks().size(), Found::kIntact));
}

std::string corruption_of(const Ticket& ticket) {
  try {
    ticket->synchronize();
  } catch (const SpillCorrupted& error) {
    return error.what();
  }
  return "no error";
}

TEST_CASE("a damaged chunk of a large block is named with its bytes and its offset, also the last, which is partial") {
  constexpr std::size_t kBytes = 2 * IoJob::kChunkBytes + 5;
  const DiskIo engine = each_engine();
  SpillFile file("/var/tmp");
  REQUIRE(file.grow(kBytes).has_value());
  const auto queue = std::make_unique<IoQueue>(engine, file, "ebb-test");
  auto content = random_bytes(kBytes, 4);
  std::vector<std::byte> back(kBytes);
  queue->submit({IoKind::kWrite, 0, content.data(), kBytes, {}})->synchronize();
  constexpr std::uint64_t kChunkPages = IoJob::kChunkBytes / kPageBytes;
  const std::string chunk = std::to_string(IoJob::kChunkBytes);
  const auto [page, named] = GENERATE_REF(table<std::uint64_t, std::string>({
      {0, "cannot read " + chunk + " bytes at offset 0 of"},
      {2 * kChunkPages - 1, "cannot read " + chunk + " bytes at offset " + chunk + " of"},
      {2 * kChunkPages, "cannot read 5 bytes at offset " + std::to_string(2 * IoJob::kChunkBytes) + " of"},
  }));
  const AlignedMemory on_disk = allocate_pages(kPageBytes);
  const auto offset = static_cast<off_t>(page * kPageBytes);
  REQUIRE(::pread(file.fd(), on_disk.get(), kPageBytes, offset) == static_cast<ssize_t>(kPageBytes));
  on_disk[4] ^= std::byte{0x10};
  REQUIRE(::pwrite(file.fd(), on_disk.get(), kPageBytes, offset) == static_cast<ssize_t>(kPageBytes));
  const Ticket ticket = queue->submit({IoKind::kRead, 0, back.data(), kBytes, {}});
  CHECK(corruption_of(ticket) == named + " the spill file in /var/tmp: they are not the bytes that were written");
  CHECK(corruption_of(ticket) == corruption_of(ticket));
}

TEST_CASE("a write that the disk lost is detected: the earlier bytes of the same block are not taken for the later") {
  const DiskIo engine = each_engine();
  SpillFile file("/var/tmp");
  REQUIRE(file.grow(kMiB).has_value());
  const auto queue = std::make_unique<IoQueue>(engine, file, "ebb-test");
  auto early = random_bytes(kMiB, 5);
  auto late = random_bytes(kMiB, 6);
  queue->submit({IoKind::kWrite, 0, late.data(), kMiB, {}})->synchronize();
  const AlignedMemory lost = allocate_pages(kMiB);
  std::memcpy(lost.get(), early.data(), kMiB);
  REQUIRE(::pwrite(file.fd(), lost.get(), kMiB, 0) == static_cast<ssize_t>(kMiB));
  std::vector<std::byte> back(kMiB);
  CHECK_THAT(corruption_of(queue->submit({IoKind::kRead, 0, back.data(), kMiB, {}})),
             Catch::Contains("not the bytes that were written"));
}

TEST_CASE("what was never written, or not as one piece, cannot be read") {
  const DiskIo engine = each_engine();
  SpillFile file("/var/tmp");
  REQUIRE(file.grow(4 * kPageBytes).has_value());
  const auto queue = std::make_unique<IoQueue>(engine, file, "ebb-test");
  auto content = random_bytes(2 * kPageBytes, 7);
  queue->submit({IoKind::kWrite, 0, content.data(), content.size(), {}})->synchronize();
  std::vector<std::byte> back(4 * kPageBytes, std::byte{0xEB});
  const auto untouched = back;
  for (const auto& [offset, bytes] : std::vector<std::pair<std::uint64_t, std::size_t>>{
           {0, kPageBytes}, {kPageBytes, kPageBytes}, {2 * kPageBytes, 1}, {0, 3 * kPageBytes}}) {
    CHECK_THAT(
        corruption_of(queue->submit({IoKind::kRead, offset, back.data(), bytes, {}})),
        Catch::StartsWith("cannot read " + std::to_string(bytes) + " bytes at offset " + std::to_string(offset)) &&
            Catch::EndsWith("they were not written as one piece"));
    CHECK(back == untouched);
  }
}

TEST_CASE("several queues of one file, each with blocks of other sizes in turn, take no block for another") {
  constexpr std::size_t kQueues = 4;
  constexpr std::size_t kRegion = 16 * kPageBytes;
  const DiskIo engine = each_engine();
  SpillFile file("/var/tmp");
  REQUIRE(file.grow(kQueues * kRegion).has_value());
  std::array<int, kQueues> wrong{};
  std::vector<std::jthread> threads;
  for (std::size_t q = 0; q < kQueues; ++q) {
    threads.emplace_back([&, q] {
      const auto out = std::make_unique<IoQueue>(engine, file, "ebb-out");
      const auto in = std::make_unique<IoQueue>(engine, file, "ebb-in");
      std::mt19937 random(static_cast<unsigned>(q));
      for (unsigned i = 0; i < 40; ++i) {
        const std::uint64_t page = random() % 16;
        const std::size_t bytes = 1 + random() % (kRegion - page * kPageBytes);
        const std::uint64_t offset = q * kRegion + page * kPageBytes;
        auto content = random_bytes(bytes, i);
        std::vector<std::byte> back(bytes);
        const Ticket written = out->submit({IoKind::kWrite, offset, content.data(), bytes, {}});
        in->submit({IoKind::kRead, offset, back.data(), bytes, {written}})->synchronize();
        wrong[q] += back == content ? 0 : 1;
      }
    });
  }
  threads.clear();
  CHECK(wrong == std::array<int, kQueues>{});
  CHECK(file.checksums().size() <= kQueues * 16);
}

}  // namespace
}  // namespace ebb

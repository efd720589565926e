#include "bench/link/disk_tier_rate.h"

#include <chrono>
#include <deque>
#include <optional>
#include <stdexcept>
#include <utility>

#include "offload/base/human_bytes.h"

namespace ebb {

DiskTierRate::DiskTierRate(const std::filesystem::path& folder, std::uint64_t file_bytes, std::span<std::byte> memory,
                           DiskIo engine)
    : folder_(folder), file_bytes_(file_bytes), memory_(memory), tier_(folder, file_bytes, engine) {}

void DiskTierRate::lease_blocks_of(std::size_t bytes) {
  blocks_.clear();
  for (std::uint64_t leased = 0; leased < file_bytes_; leased += bytes) {
    std::optional<Block> block = tier_.try_acquire(bytes);
    if (!block) {
      throw std::runtime_error("there is no room for a spill file of " + human_bytes(file_bytes_) + " in " +
                               folder_.string());
    }
    blocks_.push_back(*std::move(block));
  }
}

double DiskTierRate::gb_per_s(IoKind kind, std::size_t most_open) {
  std::deque<Ticket> open;
  const auto start = std::chrono::steady_clock::now();
  for (std::size_t i = 0; i < blocks_.size(); ++i) {
    if (open.size() == most_open) {
      open.front()->synchronize();
      open.pop_front();
    }
    open.push_back(copy(kind, i));
  }
  for (const Ticket& ticket : open) {
    ticket->synchronize();
  }
  const std::chrono::duration<double, std::nano> ns = std::chrono::steady_clock::now() - start;
  return static_cast<double>(file_bytes_) / ns.count();
}

Ticket DiskTierRate::copy(IoKind kind, std::size_t index) {
  const Block& block = blocks_[index];
  std::byte* const memory = memory_.data() + index * block.size() % memory_.size();
  return kind == IoKind::kRead ? tier_.copy_in(memory, block, {}) : tier_.copy_out(block, memory, {});
}

}  // namespace ebb

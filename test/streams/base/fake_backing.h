#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <utility>
#include <vector>

#include "streams/base/block_pool.h"

namespace ebb {

inline constexpr std::size_t kPage = BlockPool::kAlignment;
inline constexpr std::size_t kMiB = 1 << 20;

class FakeTicket final : public Completion {
 public:
  [[nodiscard]] bool done() const noexcept override { return done_; }
  void synchronize() const override {
    waited_ = true;
    throw std::runtime_error("the copy failed");
  }
  void finish() { done_ = true; }
  [[nodiscard]] bool waited() const { return waited_; }

 private:
  std::atomic<bool> done_ = false;
  mutable std::atomic<bool> waited_ = false;
};

// What a pool asked of its backing, and what the backing will give.
struct System {
  std::vector<std::size_t> requests;
  std::size_t largest = SIZE_MAX;  // more than this at once is refused
  std::mutex mutex;
  std::vector<std::pair<std::uint64_t, std::size_t>> discarded;  // addresses and bytes. LOCK: mutex
  bool gone = false;
};

// Hands out addresses with a gap after each range; there is no memory behind them.
class FakeBacking final : public Backing {
 public:
  explicit FakeBacking(System& system) : system_(system) {}
  ~FakeBacking() override { system_.gone = true; }

  std::optional<std::uint64_t> grow(std::size_t bytes) override {
    system_.requests.push_back(bytes);
    if (bytes > system_.largest) {
      return std::nullopt;
    }
    return std::exchange(next_, next_ + bytes + 2 * kPage);
  }

  void discard(std::uint64_t address, std::size_t bytes) noexcept override {
    const std::lock_guard<std::mutex> lock(system_.mutex);
    system_.discarded.emplace_back(address, bytes);
  }

 private:
  System& system_;
  std::uint64_t next_ = 16 * kPage;
};

inline std::shared_ptr<BlockPool> make_pool(System& system,
                                            std::optional<std::uint64_t> capacity_bytes = std::nullopt) {
  return std::make_shared<BlockPool>(std::make_unique<FakeBacking>(system), capacity_bytes);
}

}  // namespace ebb

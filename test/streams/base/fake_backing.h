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
  std::size_t extra = 0;           // given on top of every request
  std::mutex mutex;
  std::vector<Backing::Range> discarded;  // LOCK: mutex
  bool gone = false;
};

// Hands out addresses with a gap after each range; there is no memory behind them.
class FakeBacking final : public Backing {
 public:
  explicit FakeBacking(System& system) : system_(system) {}
  ~FakeBacking() override { system_.gone = true; }

  std::optional<Range> grow(std::size_t bytes) override {
    system_.requests.push_back(bytes);
    if (bytes > system_.largest) {
      return std::nullopt;
    }
    const Range range{next_, bytes + system_.extra};
    next_ += range.bytes / kPage * kPage + 2 * kPage;
    return range;
  }

  void discard(Range range) noexcept override {
    const std::lock_guard<std::mutex> lock(system_.mutex);
    system_.discarded.push_back(range);
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

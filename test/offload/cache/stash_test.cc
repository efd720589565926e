#include "offload/cache/stash.h"

#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>

#include <c10/core/CPUAllocator.h>
#include <catch2/catch.hpp>

#include "test/simulated/simulated_tier.h"

namespace ebb {
namespace {

// A copy that is over when the test says so.
class Copy final : public Completion {
 public:
  [[nodiscard]] bool done() const noexcept override {
    const std::lock_guard lock(mutex_);
    return over_;
  }
  void synchronize() const override {
    std::unique_lock lock(mutex_);
    ++waiting_;
    changed_.notify_all();
    changed_.wait(lock, [this] { return over_; });
  }

  void finish() {
    const std::lock_guard lock(mutex_);
    over_ = true;
    changed_.notify_all();
  }

  // A thread has called what waits for the copy, and that call has returned.
  void returned() {
    const std::lock_guard lock(mutex_);
    ++returned_;
    changed_.notify_all();
  }

  // Returns how many threads wait once `threads` of them wait or have returned.
  int waiting_of(int threads) const {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return waiting_ + returned_ >= threads; });
    return waiting_;
  }

 private:
  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  mutable int waiting_ = 0;
  int returned_ = 0;
  bool over_ = false;
};

c10::Storage new_storage() { return {c10::Storage::use_byte_size_t(), 32, c10::GetCPUAllocator(), /*resizable=*/true}; }

void hold(Stash& stash, const c10::Storage& memory, Ticket left, c10::Stream stream) {
  stash.hold(Stash::prepare(stream), {nullptr, memory, std::move(left), stream});
}

// A program that resizes a storage drains first. So drain must not return because another thread waits for the copy.
TEST_CASE("a source that another thread is letting go of is awaited, too") {
  SimulatedTier tier(Schedule::kLate, 0, std::nullopt, /*deferred_compute=*/false);
  Stash stash(tier);
  const auto copy = std::make_shared<Copy>();
  const c10::Storage source = new_storage();
  hold(stash, source, copy, tier.current_stream());
  const bool all = GENERATE(true, false);

  std::thread first([&] { stash.shrink_to(0); });
  REQUIRE(copy->waiting_of(1) == 1);
  std::thread second([&] {
    all ? stash.drain() : stash.release(source);
    copy->returned();
  });
  const int waiting = copy->waiting_of(2);
  CHECK(source.use_count() == 2);
  copy->finish();
  first.join();
  second.join();
  CHECK(waiting == 2);
  CHECK(stash.gauge().now_bytes() == 0);
  CHECK(source.use_count() == 1);
}

// On a GPU small copies are batched, and the copies of a batch share a ticket.
TEST_CASE("of sources whose copies are one batch, the one that is released goes alone") {
  SimulatedTier tier(Schedule::kLate, 0, std::nullopt, /*deferred_compute=*/false);
  Stash stash(tier);
  const auto batch = std::make_shared<Copy>();
  const c10::Storage first = new_storage();
  const c10::Storage second = new_storage();
  hold(stash, first, batch, tier.current_stream());
  hold(stash, second, batch, tier.current_stream());
  batch->finish();
  stash.release(second);
  CHECK(first.use_count() == 2);
  CHECK(second.use_count() == 1);
}

}  // namespace
}  // namespace ebb

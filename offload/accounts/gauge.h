#pragma once

#include <atomic>
#include <cstdint>
#include <utility>

#include "offload/accounts/timeline.h"

namespace ebb {

// Raises `most` to `value`, if `value` is larger.
inline void raise_to(std::atomic<std::uint64_t>& most, std::uint64_t value) {
  std::uint64_t before = most.load(std::memory_order_relaxed);
  while (value > before && !most.compare_exchange_weak(before, value, std::memory_order_relaxed)) {
  }
}

// A number of bytes that are held right now, and its peak. A lease raises the number, and the lease's end lowers it.
//
// Threads: every member may be called from any thread. Memory ordering: relaxed, because the figures inform and order
// nothing.
class Gauge {
 public:
  class Lease {
   public:
    Lease() = default;
    Lease(Lease&& other) noexcept
        : gauge_(std::exchange(other.gauge_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}
    Lease& operator=(Lease&& other) noexcept {
      std::swap(gauge_, other.gauge_);
      std::swap(bytes_, other.bytes_);
      return *this;
    }
    Lease(const Lease&) = delete;
    Lease& operator=(const Lease&) = delete;
    ~Lease() {
      if (gauge_ != nullptr) {
        gauge_->lower(bytes_);
      }
    }

    [[nodiscard]] explicit operator bool() const { return gauge_ != nullptr; }

   private:
    friend class Gauge;
    Lease(Gauge* gauge, std::uint64_t bytes) : gauge_(gauge), bytes_(bytes) {}
    Gauge* gauge_ = nullptr;
    std::uint64_t bytes_ = 0;
  };

  // `timeline`, if any, gets a sample at each change; it must outlive the gauge.
  explicit Gauge(Timeline* timeline = nullptr) : timeline_(timeline) {}
  Gauge(const Gauge&) = delete;
  Gauge& operator=(const Gauge&) = delete;

  // Raises the gauge until the lease ends. The gauge must outlive the lease.
  [[nodiscard]] Lease hold(std::uint64_t bytes) {
    raised_to(now_.fetch_add(bytes, std::memory_order_relaxed) + bytes);
    return {this, bytes};
  }

  // Raises the gauge and sets `lease`. Returns false, and changes nothing, if the sum would pass `limit`; but a gauge
  // at 0 takes any number of bytes.
  [[nodiscard]] bool try_hold(std::uint64_t bytes, std::uint64_t limit, Lease& lease) {
    std::uint64_t now = now_bytes();
    do {
      if (now != 0 && now + bytes > limit) {
        return false;
      }
    } while (!now_.compare_exchange_weak(now, now + bytes, std::memory_order_relaxed));
    raised_to(now + bytes);
    lease = Lease(this, bytes);
    return true;
  }

  [[nodiscard]] std::uint64_t now_bytes() const { return now_.load(std::memory_order_relaxed); }
  [[nodiscard]] std::uint64_t peak_bytes() const { return peak_.load(std::memory_order_relaxed); }
  void reset_peak() { peak_.store(now_bytes(), std::memory_order_relaxed); }

 private:
  void raised_to(std::uint64_t now) {
    raise_to(peak_, now);
    sample(now);
  }
  void lower(std::uint64_t bytes) noexcept { sample(now_.fetch_sub(bytes, std::memory_order_relaxed) - bytes); }
  void sample(std::uint64_t now) noexcept {
    if (timeline_ != nullptr) {
      timeline_->sample(now);
    }
  }

  Timeline* const timeline_;
  std::atomic<std::uint64_t> now_{0};
  std::atomic<std::uint64_t> peak_{0};
};

}  // namespace ebb

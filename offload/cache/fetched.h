#pragma once

#include <atomic>
#include <memory>
#include <utility>

#include <c10/core/Storage.h>
#include <c10/core/Stream.h>

#include "offload/accounts/gauge.h"
#include "streams/base/tier.h"

namespace ebb {

// A storage's bytes on the device again: the memory of a copy in, the source itself where it was still alive, or the
// result of a recipe.
//
// Threads: get() and is_unclaimed() may be called from any thread; the others one at a time.
class Fetched {
 public:
  // `stream`: the stream whose pool the memory came from. `on_device`: the source's lease; empty for other memory,
  // which is counted until it is freed. `window`: the room in the window that the bytes take until backward asks for
  // them. `tier` must outlive this object.
  Fetched(Tier& tier, c10::Storage storage, c10::Stream stream, std::shared_ptr<Gauge::Lease> on_device,
          Gauge::Lease window)
      : tier_(tier),
        on_device_(std::move(on_device)),
        storage_(std::move(storage)),
        stream_(stream),
        window_(std::move(window)) {}

  // Makes the stream wait for the copy, unless get() has: memory that a copy still writes to must not go back to the
  // stream's pool (R5 in docs/design.md).
  ~Fetched();
  Fetched(const Fetched&) = delete;
  Fetched& operator=(const Fetched&) = delete;

  // Notes that a copy into the memory has been started. Called before any other thread knows of this object.
  void arrives(Ticket arrived) noexcept { arrived_ = std::move(arrived); }

  [[nodiscard]] c10::Stream stream() const { return stream_; }
  [[nodiscard]] bool is_source() const { return on_device_ != nullptr; }
  [[nodiscard]] const c10::Storage& storage() const { return storage_; }

  // Makes the stream wait for the bytes and returns them. Throws the error that the copy failed with, where the host
  // can know of the error.
  [[nodiscard]] c10::Storage get();

  // Notes that backward has asked for the bytes: they are no longer an unclaimed prefetch, and take no room in the
  // window.
  void claim() {
    unclaimed_ = false;
    window_ = {};
  }
  [[nodiscard]] bool is_unclaimed() const { return unclaimed_; }

 private:
  Tier& tier_;
  const std::shared_ptr<Gauge::Lease> on_device_;  // outlives storage_
  const c10::Storage storage_;
  Ticket arrived_;  // the copy in; null where there is none
  const c10::Stream stream_;
  std::atomic<bool> unclaimed_{true};
  std::atomic<bool> waited_for_{false};
  Gauge::Lease window_;
};

}  // namespace ebb

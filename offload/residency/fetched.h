#pragma once

#include <atomic>
#include <memory>
#include <utility>

#include <c10/core/Storage.h>
#include <c10/core/Stream.h>

#include "offload/report/gauge.h"
#include "streams/base/mutex.h"
#include "streams/base/tier.h"

namespace ebb {

// A storage's bytes on the device again: a copy on its way in, the source itself where it was still there, or what a
// recipe made on the stream.
//
// Threads: every member may be called from any thread.
class Fetched {
 public:
  // `arrived`: the copy in; empty where there is none, or none yet. `stream`: whose pool the memory came from.
  // `on_device`: the source's lease; empty for other memory, which is counted until it is freed. `ahead`: the room that
  // it takes until it is asked for. `tier` must outlive this.
  Fetched(Tier& tier, c10::Storage storage, Ticket arrived, c10::Stream stream, std::shared_ptr<Gauge::Lease> on_device,
          Gauge::Lease ahead);

  // Memory that a copy still writes to must not go back to the stream's pool: unless somebody has waited for the copy,
  // the stream is made to wait here (R5 in docs/design.md).
  ~Fetched();
  Fetched(const Fetched&) = delete;
  Fetched& operator=(const Fetched&) = delete;

  // A copy into the memory has been started. Before any other thread knows of this object.
  void arrives(Ticket arrived) noexcept { arrived_ = std::move(arrived); }

  [[nodiscard]] c10::Stream stream() const { return stream_; }
  [[nodiscard]] bool is_source() const { return on_device_ != nullptr; }
  [[nodiscard]] const c10::Storage& storage() const { return storage_; }

  // Makes the stream wait for the bytes and returns them. From here on they are no longer fetched "ahead".
  // Throws what the copy failed with, where the host can know.
  [[nodiscard]] c10::Storage get();

  // Somebody wants the bytes, and will wait for them.
  void claim() { unclaimed_ = false; }
  [[nodiscard]] bool is_unclaimed() const { return unclaimed_; }

 private:
  Tier& tier_;
  const std::shared_ptr<Gauge::Lease> on_device_;  // outlives storage_
  const c10::Storage storage_;
  Ticket arrived_;
  const c10::Stream stream_;
  std::atomic<bool> unclaimed_{true};
  std::atomic<bool> waited_for_{false};

  Mutex mutex_;
  Gauge::Lease ahead_ EBB_GUARDED_BY(mutex_);
};

}  // namespace ebb

#pragma once

#include <cstdint>
#include <deque>
#include <memory>

#include <c10/core/Storage.h>
#include <c10/core/Stream.h>

#include "offload/accounts/gauge.h"
#include "streams/base/mutex.h"
#include "streams/base/tier.h"

namespace ebb {

// Sources whose copies out may still be under way: device memory that cannot be freed before its copy is done. The
// stash is bounded in bytes: over the bound, the compute stream waits for the oldest copy. The wait costs time but
// bounds memory, however far the host runs ahead of the device.
//
// Threads: every member may be called from any thread.
class Stash {
 public:
  // `tier` must outlive the stash.
  explicit Stash(Tier& tier) : tier_(tier) {}
  ~Stash();
  Stash(const Stash&) = delete;
  Stash& operator=(const Stash&) = delete;

  // Lets go of the oldest sources until a source of so many bytes fits within the limit.
  void make_room(std::uint64_t bytes, std::uint64_t limit_bytes) noexcept;

  // Makes room for `source`, then holds `source` until its copy out `left`
  // is done or `stream`, whose memory the source is, has waited for the copy. For a source larger than the limit the
  // stream waits at once.
  void hold(c10::Storage source, std::shared_ptr<Gauge::Lease> on_device, Ticket left, c10::Stream stream,
            std::uint64_t limit_bytes);

  // Lets go of the oldest sources whose copies are done. Never waits.
  void sweep() noexcept;

  // Makes the sources' streams wait for the oldest copies, and lets go of their sources, until the other sources are
  // within the limit. Returns when those waits have been made, by this thread or another.
  void shrink_to(std::uint64_t limit_bytes) noexcept;

  // Lets go of this source, in each version that the source was saved in, after making its stream wait for the copy.
  void release(const c10::Storage& source) noexcept;

  // Makes the sources' streams wait for all copies and lets go of all sources.
  void drain() noexcept { shrink_to(0); }

  [[nodiscard]] const Gauge& gauge() const { return gauge_; }
  [[nodiscard]] Gauge& gauge() { return gauge_; }

 private:
  struct Entry {
    std::uint64_t number;  // of this entry alone: several copies may share a ticket
    std::shared_ptr<Gauge::Lease> on_device;
    Gauge::Lease in_stash;
    c10::Storage source;
    Ticket left;
    c10::Stream stream;
  };

  // What there is to wait for before an entry goes.
  struct Wait {
    std::uint64_t number;  // the entry's
    Ticket left;
    c10::Stream stream;
  };

  [[nodiscard]] static Wait wait_for(const Entry& entry) { return {entry.number, entry.left, entry.stream}; }
  void let_go(const Wait& wait) noexcept;

  Tier& tier_;
  Gauge gauge_;
  Mutex mutex_;
  std::deque<Entry> entries_ EBB_GUARDED_BY(mutex_);  // oldest first
  std::uint64_t next_number_ EBB_GUARDED_BY(mutex_) = 0;
};

}  // namespace ebb

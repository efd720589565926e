#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>

#include <c10/core/Storage.h>
#include <c10/core/Stream.h>

#include "offload/accounts/gauge.h"
#include "streams/base/mutex.h"
#include "streams/base/tier.h"

namespace ebb {

// Device memory whose copies out may still be under way, and which cannot be freed before its copy is done. The memory
// is bounded in bytes: over the bound, the stream that owns the oldest memory waits for the copy. The wait costs time
// but bounds memory, however far the host runs ahead of the device.
//
// Threads: every member may be called from any thread. Memory is freed outside of the lock, because that may run other
// people's code.
class Stash {
 public:
  // Names a departure, for good. Numbers rise.
  using Number = std::uint64_t;

  // What becomes of memory whose copy out is known to have failed. kIsLetGo: the error reaches whoever asks for the
  // bytes. kStays: until take().
  enum class IfCopyFails : bool { kIsLetGo, kStays };

  struct Departure {
    std::shared_ptr<Gauge::Lease> on_device;  // outlives memory
    c10::Storage memory;
    Ticket left;         // the copy out
    c10::Stream stream;  // whose memory it is
    IfCopyFails if_copy_fails = IfCopyFails::kIsLetGo;
  };

 private:
  struct Entry {
    Departure departure;
    Gauge::Lease counted;
  };
  using Entries = std::map<Number, Entry>;  // oldest first

 public:
  // Room for one departure, so that hold() cannot fail.
  using Place = Entries::node_type;

  // `tier` must outlive this object.
  explicit Stash(Tier& tier) : tier_(tier) {}
  ~Stash();
  Stash(const Stash&) = delete;
  Stash& operator=(const Stash&) = delete;

  // Called before the copy out is started. Throws std::bad_alloc.
  [[nodiscard]] static Place prepare(c10::Stream stream) {
    Entries one;
    return one.extract(one.try_emplace(0, Entry{{nullptr, {}, nullptr, stream}, {}}).first);
  }

  // Lets go of the oldest memory until so many bytes fit within the limit.
  void make_room(std::uint64_t bytes, std::uint64_t limit_bytes) noexcept;

  static constexpr std::uint64_t kNoLimit = ~std::uint64_t{0};

  // Makes room for the memory, then holds the memory until its copy out is done, or until `stream` has waited for the
  // copy. For memory larger than the limit the stream waits at once.
  Number hold(Place place, Departure departure, std::uint64_t limit_bytes = kNoLimit) noexcept;

  // Gives the memory back, behind whose copy out, Departure::left, the caller then is; nullopt where the memory has
  // been let go of.
  [[nodiscard]] std::optional<Departure> take(Number number) noexcept;

  // Lets go of the oldest memory whose copy is done; sweep() goes on while there is any. Never waits. Returns whether
  // memory was let go of.
  bool sweep_oldest() noexcept;
  void sweep() noexcept {
    while (sweep_oldest()) {
    }
  }

  // Makes streams wait for the oldest copies, and lets go of their memory, until the rest is within the limit. Returns
  // when those waits have been made, by this thread or another.
  void shrink_to(std::uint64_t limit_bytes) noexcept;

  // Does the same for the oldest alone. Returns false where there is none.
  bool let_go_of_oldest() noexcept;

  // Blocks the calling thread until the oldest copy is done, and lets go of the memory. Returns false where there is
  // none.
  bool block_for_oldest() noexcept;

  // Lets go of one departure's memory, or of the memory of a source, in each version that the source was saved in,
  // after making its stream wait for the copy.
  void release(Number number) noexcept;
  void release(const c10::Storage& source) noexcept;

  // Makes streams wait for all copies and lets go of all memory.
  void drain() noexcept { shrink_to(0); }

  [[nodiscard]] const Gauge& gauge() const { return gauge_; }
  [[nodiscard]] Gauge& gauge() { return gauge_; }

 private:
  // What there is to wait for before an entry goes.
  struct Wait {
    Number number;  // of this entry alone: several copies may share a ticket
    Ticket left;
    c10::Stream stream;
  };

  [[nodiscard]] static Wait wait_for(const Entries::value_type& entry);
  [[nodiscard]] std::optional<Wait> oldest() noexcept;
  [[nodiscard]] Place remove_locked(Entries::iterator at) noexcept EBB_REQUIRES(mutex_);
  [[nodiscard]] Place end_locked(Entries::iterator at) noexcept EBB_REQUIRES(mutex_);
  void let_go(const Wait& wait) noexcept;

  Tier& tier_;
  Gauge gauge_;
  Mutex mutex_;
  Entries entries_ EBB_GUARDED_BY(mutex_);
  Entries failed_ EBB_GUARDED_BY(mutex_);  // whose memory stays
  Number next_number_ EBB_GUARDED_BY(mutex_) = 0;
};

}  // namespace ebb

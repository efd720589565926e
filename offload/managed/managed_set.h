#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>
#include <c10/core/Stream.h>

#include "offload/accounts/gauge.h"
#include "offload/cache/residency.h"
#include "offload/managed/managed_storage.h"
#include "offload/managed/use_order.h"
#include "offload/stats.h"
#include "streams/base/mutex.h"

namespace ebb {

class Steps;
class UseLog;

// The managed storages of one offloader: which of them are on the device, within a bound in bytes. The order in which
// the program uses them is learned (UseHistory). What is expected next is prefetched, and what is expected last leaves
// first, which is what Belady's rule asks for.
//
// Note [The bound of managed storages]
// `device_bytes` bounds the bytes on the device, of prefetches and of copies out that are under way too. One operation
// needs all of its storages at once, and gets them, whatever the bound is. The bound is the program's, or a plan's,
// which then may change it from step to step.
//
// Note [The host's lead]
// On a GPU the host is ahead of the device: it asks for a storage long before the device uses the storage, and it sees
// memory freed only when the device has copied that memory out. A host that never waited would find no room for
// prefetches, ask for each storage at the storage's use, and so have the device wait for each copy with nothing to do.
// So the host waits, after it has queued an operation, for the oldest copies home, until what is expected next is under
// way. Meanwhile the device has all to do that the host is ahead. On a CPU nothing runs ahead, and prefetches wait for
// nothing.
//
// Note [Copies home are early]
// Room for a fetch is there when another storage's copy home is done. So copies home start earlier than fetches, by the
// bytes of the largest storage: of what is expected last, as much as the next fetches will ask for. The memory of what
// has been copied is kept until somebody asks for the room, and a use before that finds the bytes. Without this, one
// large matrix that has been written (an embedding's) leaves only when the next small one is to come, which then waits
// for the whole copy.
//
// Threads: every member may be called from any thread.
class ManagedSet final : public std::enable_shared_from_this<ManagedSet> {
 public:
  struct Limits {
    std::uint64_t device_bytes = 0;
    // How far ahead of its use a storage may be fetched, in bytes of storages; nullopt: fetched_ahead().
    std::optional<std::uint64_t> prefetch_bytes;
    std::uint64_t minimum_bytes = 0;   // smaller storages stay where they are
    std::uint64_t resident_bytes = 0;  // of those that stay on the device
    bool states = true;                // whether those that an optimizer makes are managed
  };

  using Slot = ManagedStorage::Slot;

  // `steps` must live as long as `residency`.
  ManagedSet(std::shared_ptr<Residency> residency, Steps& steps, Limits limits);
  ManagedSet(const ManagedSet&) = delete;
  ManagedSet& operator=(const ManagedSet&) = delete;

  [[nodiscard]] Residency& residency() { return *residency_; }
  [[nodiscard]] const std::shared_ptr<Residency>& shared_residency() { return residency_; }

  // Whether the tensor has a storage that can be managed: a dense one on the tier's device, not below the minimum.
  [[nodiscard]] bool takes(const at::Tensor& tensor) const;

  [[nodiscard]] Slot make_slot();

  // Takes over a storage that has its bytes, and gives it a home. `slot`: its place, unless a storage that is alive has
  // that; null: any. `used_on`: streams that may be using the bytes, beside the current one. Returns null where the
  // tier has no room. Throws std::invalid_argument for memory that LibTorch does not own.
  [[nodiscard]] std::shared_ptr<ManagedStorage> add(const c10::Storage& storage, Slot slot = nullptr,
                                                    std::vector<c10::Stream> used_on = {});

  // Forgets a storage that has been released.
  void remove(const std::shared_ptr<ManagedStorage>& storage);

  // Whether a storage of so many bytes could be resident if no other were.
  [[nodiscard]] bool may_keep(std::uint64_t bytes) const { return bytes <= limits_.resident_bytes; }

  // Reserves room for a storage that stays on the device for good, in place of add(), until the lease ends. Empty:
  // there is no room. Throws as Residency::check_process.
  [[nodiscard]] Gauge::Lease keep(std::uint64_t bytes);

  // A storage that an operation uses, and whether the operation may write to it.
  struct Use {
    std::shared_ptr<ManagedStorage> storage;
    bool written = false;
  };

  // Brings the bytes of all of them to the device, ready for work on `stream`, as room is needed sends others home, and
  // prefetches what is expected next. The caller has called begin_use() of each. Returns whether more is to be
  // prefetched by prefetch(), once the caller has begun its work and called end(). May block, on a GPU too, where
  // another thread uses bytes at home (docs/threads.md). Throws as ManagedStorage::bring.
  [[nodiscard]] bool bring(std::span<const Use> uses, c10::Stream stream);

  // Ends uses that the caller has begun, whether or not bring() has been called.
  void end(std::span<const Use> uses) noexcept;

  // Prefetches what is expected next, for which copies home have to be done. Blocks the calling thread until then: see
  // Note [The host's lead].
  void prefetch() noexcept;

  // Sends home what is over the bound.
  void fit() { static_cast<void>(make_room(0, /*needed_in=*/0, CopiesHome::kMakeStreamsWait)); }

  // Sends home all that is not in use.
  void send_home();

  // Sends one of the set's storages home. Returns false where ManagedStorage::leave does.
  bool send_home(const std::shared_ptr<ManagedStorage>& storage);

  // Sends the storage home, and then has the calling thread use the bytes at home, as ManagedStorage's function of this
  // name. Blocks the calling thread until the copies that this takes are over.
  [[nodiscard]] void* begin_use_at_home(const std::shared_ptr<ManagedStorage>& storage);

  // Makes streams, or on a CPU the calling thread, wait for all copies home, and lets go of the memory.
  void drain() noexcept { shared_.stash.drain(); }

  // The bytes on the device.
  [[nodiscard]] std::uint64_t held_bytes() const { return shared_.on_device.now_bytes(); }

  // Lets go of device memory until `enough` returns true or no more can go: makes streams wait for copies home that are
  // under way, the oldest first, and then sends home what is expected last. Waits for no lock under which device memory
  // is asked for or the interpreter's lock is taken, because the caller may hold the device allocator's lock.
  void let_go(const std::function<bool()>& enough);

  // Ends the references to the program's storages that evictions have left, because an eviction must not take the
  // interpreter's lock. An operation does so, too.
  void end_references() noexcept;

  // Lets go of the homes of storages that the program has let go of.
  void forget_the_dead();

  // True once.
  [[nodiscard]] bool is_first_refusal() noexcept { return !refused_.exchange(true); }

  [[nodiscard]] const std::optional<std::uint64_t>& prefetch_bytes() const { return limits_.prefetch_bytes; }

  // The bound. A lower one is kept from the next call of fit(), or the next fetch, on.
  [[nodiscard]] std::uint64_t device_bytes() const { return device_bytes_; }
  void set_device_bytes(std::uint64_t bytes) { device_bytes_ = bytes; }
  [[nodiscard]] bool is_over_bound() const { return shared_.on_device.now_bytes() > device_bytes_; }

  // For a plan that sets the bound: all uses are logged from now on. Null: there is no log.
  void log_to(std::shared_ptr<UseLog> log);
  [[nodiscard]] std::shared_ptr<UseLog> log();

  [[nodiscard]] bool takes_states() const { return limits_.states; }

  // Adds what is managed now, and the bounds.
  void add_to(Stats& stats);

 private:
  using Stored = std::shared_ptr<ManagedStorage>;

  // What to do where only copies home that are under way are in the way.
  enum class CopiesHome : std::uint8_t { kMakeStreamsWait, kBlock, kGiveUp };
  enum class Room : std::uint8_t { kThere, kNotThere, kNotYet };

  // A storage on the device that is not in use.
  struct Expected {
    UseOrder::Key key;
    Stored storage;
  };

  // A storage that is expected and not on the device.
  struct Wanted {
    Stored storage;
    std::uint64_t in;     // so many uses
    bool is_fetched_now;  // or only has room made
  };

  [[nodiscard]] Stored exchange_stored(std::uint32_t item, Stored storage) EBB_REQUIRES(mutex_);
  void sort_in(std::uint32_t item) noexcept EBB_REQUIRES(mutex_);
  // Forgets what is there if the program has let go of it; `dead` gets it, to be destroyed after the lock is released.
  void take_if_dead(std::uint32_t item, std::vector<Stored>& dead) EBB_REQUIRES(mutex_);
  void sort_in(const ManagedStorage& storage) noexcept;
  [[nodiscard]] bool is_there(const UseOrder::Key& key, UseOrder::Where where) EBB_REQUIRES(mutex_);
  [[nodiscard]] std::uint64_t fetched_ahead_bytes() const;
  bool note_operation(std::span<const Use> uses);
  [[nodiscard]] Room make_room(std::uint64_t bytes, std::uint64_t needed_in, CopiesHome copies);
  [[nodiscard]] std::optional<Expected> last_expected(std::uint64_t needed_in,
                                                      const std::optional<UseOrder::Key>& before = std::nullopt);
  void bring_one(ManagedStorage& storage, c10::Stream stream);
  void make_saves_leave(std::uint64_t bytes);
  [[nodiscard]] Room prefetch_expected(CopiesHome copies, std::size_t most);
  [[nodiscard]] std::uint64_t staying_bytes() const;
  [[nodiscard]] std::vector<Wanted> expected_from_home(std::size_t most);
  void leave_ahead(const std::vector<Wanted>& wanted);
  void evict(ManagedStorage& storage);

  const std::shared_ptr<Residency> residency_;
  Steps& steps_;
  const Limits limits_;
  std::atomic<std::uint64_t> device_bytes_;
  ManagedStorage::Set shared_;
  std::atomic<bool> refused_{false};

  Mutex mutex_;  // is held over nothing that asks for device memory, lets go of some or takes the interpreter's lock
  UseOrder order_ EBB_GUARDED_BY(mutex_);  // of what is not in use
  std::uint32_t next_looked_at_ EBB_GUARDED_BY(mutex_) = 0;
  std::shared_ptr<UseLog> log_ EBB_GUARDED_BY(mutex_);   // null for none
  std::vector<Stored> storages_ EBB_GUARDED_BY(mutex_);  // by item; null where the program has let go of the storage
  std::vector<std::uint32_t> free_items_ EBB_GUARDED_BY(mutex_);  // in no slot
  std::size_t largest_ EBB_GUARDED_BY(mutex_) = 0;                // the bytes of the largest storage so far
  // Of storages that evictions have looked at, for end_references().
  std::vector<c10::intrusive_ptr<c10::StorageImpl>> references_ EBB_GUARDED_BY(mutex_);
};

}  // namespace ebb

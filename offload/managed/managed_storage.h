#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <thread>
#include <vector>

#include <c10/core/Allocator.h>
#include <c10/core/Storage.h>
#include <c10/core/Stream.h>

#include "offload/accounts/gauge.h"
#include "offload/cache/home_block.h"
#include "offload/cache/residency.h"
#include "offload/cache/stash.h"
#include "streams/base/block_pool.h"
#include "streams/base/mutex.h"
#include "streams/base/ticket.h"
#include "streams/base/tier.h"

namespace ebb {

// A storage of the program's whose bytes live in a block of a tier, their home, and are on the device around their uses
// only. The program's StorageImpl stays the same, so views, tied weights and everything else that shares the storage
// see each write: while the bytes are away, the StorageImpl has its size and no memory. Whoever asks for the memory
// outside of a use gets an error, wherever the bytes are, because a pointer would outlive the memory, and nobody would
// know of a write.
//
// kHome       The home alone has the bytes, or on a GPU gets them by a copy out that the owner has waited for.
// kArriving   The memory is here, and a copy in may be under way, or the copy out after which the memory came back. The
//             StorageImpl does not have the memory yet: the program's end of the storage cannot free what a copy uses.
// kInstalled  The StorageImpl has the memory.
// kLeaving    A copy out is under way or done, and the memory is among the set's stash, or has been let go of. A
//             use gets the memory back, behind the copy. If the copy is known to have failed, as a copy to a disk may,
//             the memory comes back for good.
// kReleased   The program has resized the storage, given it other memory or asked for it: the bytes are the program's
//             affair again.
//
// Ordering: as for saved storages (R1 to R5 in docs/design.md). The memory is always from the pool of one stream, the
// owner, whose memory the program takes it for and may free at any time. ebb frees the memory behind all streams that
// have used the bytes.
//
// Threads: every member may be called from any thread.
class ManagedStorage {
 public:
  // What the storages of one set share.
  struct Set {
    explicit Set(Residency& of)
        : tier(of.tier()), homes(of.managed_homes()), on_device(of.managed_on_device()), stash(tier) {}
    Tier& tier;
    Gauge& homes;
    Gauge& on_device;
    Gauge away;   // the bytes in kHome and kLeaving
    Stash stash;  // the part of `on_device` in kLeaving
  };

  // A place among the set's storages, given back with the last reference: a small number. To the set's history those
  // that follow one another in a place are one, as the gradients of a leaf are.
  using Slot = std::shared_ptr<const std::uint32_t>;

  // `storage`: with memory, which becomes the bytes, and which belongs to the current stream. `used_on`: other streams
  // that may be using it. `set` must outlive this object.
  ManagedStorage(Set& set, const c10::Storage& storage, Block home, Slot slot, std::vector<c10::Stream> used_on);
  ~ManagedStorage();
  ManagedStorage(const ManagedStorage&) = delete;
  ManagedStorage& operator=(const ManagedStorage&) = delete;

  [[nodiscard]] std::size_t bytes() const { return bytes_; }
  [[nodiscard]] std::uint32_t item() const { return *slot_; }

  // Whether the StorageImpl has the memory, or will have it without a copy in to be started; whether it has the memory;
  // whether the state is kHome or kLeaving. Only hints: another thread may change that.
  [[nodiscard]] bool is_here() const { return state_ == State::kInstalled || state_ == State::kArriving; }
  [[nodiscard]] bool is_installed() const { return state_ == State::kInstalled; }
  [[nodiscard]] bool is_away() const { return state_ == State::kHome || state_ == State::kLeaving; }

  // Whether a use needs device memory to be asked for. Has the memory of a departure that is not over come back.
  [[nodiscard]] bool needs_memory() { return state_ == State::kHome || (state_ == State::kLeaving && !comes_back()); }

  // Whether leave() could have the bytes leave, or the storage has ended. Only a hint, too.
  [[nodiscard]] bool can_leave() const { return is_here() && uses_ == 0 && (!stays_now_ || !is_alive()); }

  // Whether the home has the bytes, so that they leave without a copy.
  [[nodiscard]] bool home_has_bytes() {
    const MutexLock lock(mutex_);
    return homes_ != HomesBytes::kOld;
  }

  // Whether the program still has the storage.
  [[nodiscard]] bool is_alive() const { return !storage_.expired(); }

  // Whether the bytes are ebb's affair: the program has the storage, and has neither resized it nor given it memory.
  [[nodiscard]] bool comes_and_goes();

  // true: from now on only who asks to write gets an error. A profiler reads the address of each tensor that it notes,
  // and lets no error out; of bytes that are away the address is null. Counts for a storage at its next change, or from
  // renew_refusal() on.
  static void let_addresses_be_read(bool let);
  void renew_refusal();

  // Until the matching end_use(), the bytes do not leave.
  void begin_use();

  // Called between begin_use() and end_use(): has the StorageImpl hold the bytes, ready for work on `stream`. Blocks
  // while another thread uses them at home. Throws c10::OutOfMemoryError, the error that a copy failed with, or
  // c10::Error where the calling thread itself uses them at home.
  void bring(c10::Stream stream);

  // `written`: whether the use may have written to the bytes.
  void end_use(bool written) noexcept;

  // Called between bring() and end_use(): the bytes stay where they are from now on, and are the program's affair.
  void release();

  // Blocks the calling thread until the copies to and from the home that have been started are over.
  void wait_for_copies_at_home();

  // Has the calling thread read and write the bytes at home until end_use_at_home(); bring() on another thread waits
  // until then. Returns the home's memory; null, and there is nothing to end, where the bytes are in use or on the
  // device, where a copy of them is under way, or where the home is no memory. Throws the error of a copy home that
  // failed once its memory had been let go of.
  [[nodiscard]] void* begin_use_at_home();
  void end_use_at_home() noexcept;

  // true: the bytes at home are about to change, until the next use there or on the device, and are not worth a copy in
  // before that.
  void set_is_about_to_change(bool is_about_to) { is_about_to_change_ = is_about_to; }
  [[nodiscard]] bool is_about_to_change() const { return is_about_to_change_; }

  // Starts the copy in before anybody asks, or has the memory of bytes that are leaving come back. Returns false where
  // the copy in cannot be started, or the bytes are used at home.
  bool prefetch() noexcept;

  // kArriving, kInstalled -> kHome where the home has the bytes, else kLeaving. Returns false where the bytes are in
  // use, not on the device, or cannot leave.
  bool leave() noexcept;

  // Has the bytes leave, if they have not left, and lets go of the memory at once: the owner waits for the copy out.
  // Returns false, and does nothing, where the bytes cannot leave or another thread holds the lock, so that the caller
  // may hold the device allocator's lock. `reference`: gets, in any case, a reference to the program's storage that may
  // be the last, for the caller to end where the interpreter's lock may be taken.
  bool evict(c10::intrusive_ptr<c10::StorageImpl>& reference) noexcept;

 private:
  [[nodiscard]] bool comes_back();

  enum class State : std::uint8_t { kHome, kArriving, kInstalled, kLeaving, kReleased };
  enum class HomesBytes : std::uint8_t { kOld, kUnderWay, kSame };

  // Device memory, and the lease that counts it. Asked for without the lock.
  struct Memory {
    std::shared_ptr<Gauge::Lease> on_device;
    c10::DataPtr data;
  };

  // What is destroyed after mutex_ is released: the device memory, and a reference to the program's storage that may be
  // the last.
  struct Garbage {
    c10::DataPtr memory;
    c10::intrusive_ptr<c10::StorageImpl> storage;
  };

  bool leave_locked(Garbage& garbage) noexcept EBB_REQUIRES(mutex_);
  void come_back_locked() noexcept EBB_REQUIRES(mutex_);
  [[nodiscard]] Memory take_memory() const;
  void start_copy_in_locked(Memory& memory) EBB_REQUIRES(mutex_);
  void install_locked(c10::StorageImpl& storage, c10::DataPtr& unwanted) EBB_REQUIRES(mutex_);
  void order_behind_copies_locked(c10::Stream stream) EBB_REQUIRES(mutex_);
  void report_use_locked(c10::Stream stream) EBB_REQUIRES(mutex_);
  void wait_for_users_locked() EBB_REQUIRES(mutex_);
  void stay_after_failure_locked() EBB_REQUIRES(mutex_);
  [[nodiscard]] c10::DataPtr drop_locked(WaitPoint after_out) noexcept EBB_REQUIRES(mutex_);
  [[nodiscard]] bool is_replaced_while_away_locked(c10::StorageImpl& storage) const EBB_REQUIRES(mutex_);
  void release_if_replaced_locked(c10::StorageImpl& storage) EBB_REQUIRES(mutex_);

  Set& set_;
  const c10::weak_intrusive_ptr<c10::StorageImpl> storage_;
  const std::size_t bytes_;
  const Slot slot_;
  const c10::Stream owner_;
  std::atomic<State> state_{State::kInstalled};  // changes under mutex_ only
  std::atomic<int> uses_{0};                     // the same
  std::atomic<bool> stays_now_{false};           // a copy out has failed
  std::atomic<bool> is_about_to_change_{false};

  Mutex mutex_;
  std::condition_variable use_at_home_is_over_;
  std::optional<std::thread::id> user_at_home_ EBB_GUARDED_BY(mutex_);  // who is one of uses_
  HomesBytes homes_ EBB_GUARDED_BY(mutex_) = HomesBytes::kOld;
  HomeBlock home_ EBB_GUARDED_BY(mutex_);
  std::vector<c10::Stream> users_ EBB_GUARDED_BY(mutex_);  // other streams that have used the memory
  const void* data_ EBB_GUARDED_BY(mutex_);                // kInstalled
  Memory memory_ EBB_GUARDED_BY(mutex_);                   // kArriving; kInstalled: the lease alone
  Stash::Number departure_ EBB_GUARDED_BY(mutex_) = 0;     // kLeaving
  const Gauge::Lease home_bytes_;
  Gauge::Lease away_ EBB_GUARDED_BY(mutex_);  // kHome, kLeaving
};

}  // namespace ebb

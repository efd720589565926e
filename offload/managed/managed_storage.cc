#include "offload/managed/managed_storage.h"

#include <algorithm>
#include <exception>
#include <mutex>
#include <string>
#include <utility>

#include <c10/core/impl/COW.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include "offload/base/libtorch_members.h"
#include "offload/base/log.h"
#include "offload/base/references.h"

namespace ebb {
namespace {

std::atomic<bool> addresses_are_read{false};  // ManagedStorage::let_addresses_be_read

// Writes only what changes: another thread that uses the bytes may be reading, and its use has set the same value.
void set(bool& flag, bool value) {
  if (flag != value) {
    flag = value;
  }
}

void refuse_access(c10::StorageImpl& storage, bool refuse) {
  const Refusals refusals = refusals_of(storage);
  set(refusals.all, refuse && !addresses_are_read);
  if (!refuse) {
    set(refusals.writes, false);
  } else if (!refusals.writes) {
    storage.set_throw_on_mutable_data_ptr();  // LibTorch then looks at each write, for memory that is shared, too
  }
}

// Of work that is done: what it has failed with.
std::optional<std::string> failure_of(const Ticket& done) {
  try {
    if (done != nullptr) {
      done->synchronize();
    }
    return std::nullopt;
  } catch (const std::exception& error) {
    return error.what();
  } catch (...) {
    return "an error that is no std::exception";
  }
}

const void* data_without_checks(c10::StorageImpl& storage) { return storage._mutable_data_ptr_no_checks().get(); }

}  // namespace

ManagedStorage::ManagedStorage(Set& set, const c10::Storage& storage, Block home, Slot slot,
                               std::vector<c10::Stream> used_on)
    : set_(set),
      storage_(storage.getWeakStorageImpl()),
      bytes_(storage.nbytes()),
      slot_(std::move(slot)),
      owner_(set.tier.current_stream()),
      home_(set.tier, std::move(home)),
      users_(std::move(used_on)),
      data_(storage.data()),
      memory_{std::make_shared<Gauge::Lease>(set.on_device.hold(bytes_)), {}},
      home_bytes_(set.homes.hold(bytes_)) {
  std::erase(users_, owner_);
  c10::StorageImpl& impl = *storage.unsafeGetStorageImpl();
  if (!owner_.device().is_cpu()) {  // the memory may be another stream's: it is freed behind this one, too
    c10::impl::VirtualGuardImpl(owner_.device().type()).recordDataPtrOnStream(impl.data_ptr(), owner_);
  }
  impl.get_extra_meta().custom_data_ptr_error_msg_ =
      "ebb: this tensor's memory is managed and comes and goes, and was asked for without an operation on the tensor "
      "(data_ptr(), numpy(), print, tolist, saving it, an older tensor of the same storage or a graph from before "
      "manage()). Take a copy first, such as tensor.detach().clone().";
  refuse_access(impl, true);
}

ManagedStorage::~ManagedStorage() {
  const MutexLock lock(mutex_);
  const c10::DataPtr memory = drop_locked(WaitPoint::kStashEnd);
}

bool ManagedStorage::comes_back() {
  const MutexLock lock(mutex_);
  come_back_locked();
  return state_ != State::kHome;
}

bool ManagedStorage::comes_and_goes() {
  const c10::intrusive_ptr<c10::StorageImpl> storage = storage_.lock();  // as in end_use
  const MutexLock lock(mutex_);
  if (!storage) {
    return false;
  }
  release_if_replaced_locked(*storage);
  return state_ != State::kReleased && !is_replaced_while_away_locked(*storage);
}

void ManagedStorage::let_addresses_be_read(bool let) { addresses_are_read = let; }

void ManagedStorage::renew_refusal() {
  const c10::intrusive_ptr<c10::StorageImpl> storage = storage_.lock();  // as in end_use
  const MutexLock lock(mutex_);
  if (storage && uses_ == 0 && state_ != State::kReleased) {
    refuse_access(*storage, true);
  }
}

void ManagedStorage::begin_use() {
  const MutexLock lock(mutex_);
  ++uses_;
}

void ManagedStorage::end_use(bool written) noexcept {
  // Made before the lock is taken and destroyed after: Note [The interpreter's lock].
  const c10::intrusive_ptr<c10::StorageImpl> storage = storage_.lock();
  const MutexLock lock(mutex_);
  --uses_;
  if (!storage || state_ == State::kReleased) {
    return;
  }
  if (written && state_ == State::kInstalled) {
    homes_ = HomesBytes::kOld;
  }
  release_if_replaced_locked(*storage);
  refuse_access(*storage, uses_ == 0 && state_ != State::kReleased);
}

void ManagedStorage::bring(c10::Stream stream) {
  is_about_to_change_ = false;
  Memory memory;                                                         // what is not used ends after the lock
  c10::DataPtr unwanted;                                                 // the same
  const c10::intrusive_ptr<c10::StorageImpl> storage = storage_.lock();  // as in end_use
  while (true) {
    {
      const MutexLock lock(mutex_);
      while (user_at_home_) {
        TORCH_CHECK(user_at_home_ != std::this_thread::get_id(),
                    "ebb: a managed tensor is used while this thread updates it in host memory");
        mutex_.wait(use_at_home_is_over_);
      }
      TORCH_INTERNAL_ASSERT(storage && uses_ > 0);
      release_if_replaced_locked(*storage);
      if (state_ == State::kReleased) {
        return;
      }
      if (is_replaced_while_away_locked(*storage)) {
        refuse_access(*storage, false);
        unwanted = drop_locked(WaitPoint::kStashEnd);
        away_ = {};
        state_ = State::kReleased;
        return;
      }
      come_back_locked();
      if (state_ == State::kHome && memory.on_device != nullptr) {
        start_copy_in_locked(memory);
      }
      if (state_ != State::kHome) {
        install_locked(*storage, unwanted);
        order_behind_copies_locked(stream);
        refuse_access(*storage, false);
        return;
      }
    }
    memory = take_memory();
  }
}

// kArriving -> kInstalled. Where the copy in has failed, throws its error: -> kHome. `unwanted`: is to be destroyed
// after the mutex is released.
void ManagedStorage::install_locked(c10::StorageImpl& storage, c10::DataPtr& unwanted) {
  if (state_ != State::kArriving) {
    return;
  }
  try {
    set_.tier.wait(WaitPoint::kUseAfterIn, owner_, home_.copied_in());
  } catch (...) {
    unwanted = drop_locked(WaitPoint::kStashEnd);
    throw;
  }
  if (homes_ == HomesBytes::kUnderWay) {  // the program may write to the memory, or free it
    set_.tier.wait_or_block(WaitPoint::kBackAfterOut, owner_, home_.copied_out());
    stay_after_failure_locked();
  }
  data_ = memory_.data.get();
  storage._mutable_data_ptr_no_checks() = std::exchange(memory_.data, {});
  state_ = State::kInstalled;
}

// Of work on `stream` that is to come. The memory is the owner's, which has waited for the copies.
void ManagedStorage::order_behind_copies_locked(c10::Stream stream) {
  if (stream == owner_) {
    report_use_locked(stream);
    return;
  }
  set_.tier.wait(WaitPoint::kUseAfterIn, stream, home_.copied_in());
  set_.tier.wait_or_block(WaitPoint::kBackAfterOut, stream, home_.copied_out());
  if (std::ranges::find(users_, stream) == users_.end()) {
    users_.push_back(stream);
  }
}

void ManagedStorage::release() {
  const c10::intrusive_ptr<c10::StorageImpl> storage = storage_.lock();  // as in end_use
  const MutexLock lock(mutex_);
  if (storage && state_ == State::kInstalled) {
    wait_for_users_locked();
    refuse_access(*storage, false);
    state_ = State::kReleased;
    memory_.on_device = nullptr;
  }
}

void ManagedStorage::wait_for_copies_at_home() {
  std::vector<Ticket> copies;
  {
    const MutexLock lock(mutex_);
    copies = home_.users();
  }
  for (const Ticket& copy : copies) {
    if (in_force(WaitPoint::kAtHomeAfterUsers)) {
      try {
        copy->synchronize();
      } catch (...) {  // begin_use_at_home() knows what to do
      }
    }
  }
}

void* ManagedStorage::begin_use_at_home() {
  Garbage garbage{{}, storage_.lock()};
  const MutexLock lock(mutex_);
  const bool are_copied = in_force(WaitPoint::kAtHomeAfterUsers) && !std::ranges::all_of(home_.users(), is_done);
  if (uses_ > 0 || are_copied || !set_.tier.blocks_are_memory()) {
    return nullptr;
  }
  if (state_ == State::kLeaving) {
    come_back_locked();
    if (!stays_now_) {
      garbage.memory = drop_locked(WaitPoint::kStashBound);
    }
  }
  if (state_ != State::kHome || !garbage.storage || is_replaced_while_away_locked(*garbage.storage)) {
    return nullptr;
  }
  if (home_.copied_out() != nullptr && is_done(home_.copied_out())) {
    home_.copied_out()->synchronize();  // throws where the copy has failed
  }
  ++uses_;
  user_at_home_ = std::this_thread::get_id();
  return home_.data();
}

void ManagedStorage::end_use_at_home() noexcept {
  const c10::intrusive_ptr<c10::StorageImpl> storage = storage_.lock();  // as in end_use
  {
    const MutexLock lock(mutex_);
    --uses_;
    user_at_home_.reset();
    is_about_to_change_ = false;
    homes_ = HomesBytes::kSame;
    if (storage && state_ != State::kReleased) {  // a use that did not get the bytes has let the address be read
      refuse_access(*storage, uses_ == 0);
    }
  }
  use_at_home_is_over_.notify_all();
}

bool ManagedStorage::prefetch() noexcept {
  const c10::intrusive_ptr<c10::StorageImpl> storage = storage_.lock();  // as in end_use
  try {
    Memory memory;  // as in bring
    while (true) {
      {
        const MutexLock lock(mutex_);
        if (!storage || is_replaced_while_away_locked(*storage)) {
          return true;
        }
        come_back_locked();
        if (state_ != State::kHome || uses_ > 0) {
          return state_ != State::kHome;
        }
        if (memory.on_device != nullptr) {
          start_copy_in_locked(memory);
          return true;
        }
      }
      memory = take_memory();
    }
  } catch (...) {  // whoever uses the bytes fetches them
    return false;
  }
}

bool ManagedStorage::leave() noexcept {
  Garbage garbage{{}, storage_.lock()};
  const MutexLock lock(mutex_);
  return leave_locked(garbage);
}

bool ManagedStorage::leave_locked(Garbage& garbage) noexcept {
  try {
    if (uses_ > 0 || !is_here() || (stays_now_ && garbage.storage)) {
      return false;
    }
    if (state_ == State::kArriving && homes_ != HomesBytes::kUnderWay) {
      garbage.memory = drop_locked(WaitPoint::kStashEnd);
      return true;
    }
    // Whatever may fail comes before the bytes leave.
    Stash::Place place = Stash::prepare(owner_);
    c10::Storage box(c10::Storage::use_byte_size_t(), bytes_, c10::DataPtr(nullptr, set_.tier.device()));
    if (state_ == State::kInstalled) {
      if (!garbage.storage) {
        return false;
      }
      c10::StorageImpl& storage = *garbage.storage;
      release_if_replaced_locked(storage);
      if (state_ == State::kReleased || c10::impl::cow::is_cow_data_ptr(storage._mutable_data_ptr_no_checks())) {
        return false;
      }
      wait_for_users_locked();
      if (homes_ == HomesBytes::kOld) {
        home_.copy_out(data_, owner_);
        homes_ = HomesBytes::kUnderWay;
      }
      memory_.data = std::exchange(storage._mutable_data_ptr_no_checks(), c10::DataPtr(nullptr, set_.tier.device()));
      refuse_access(storage, true);
    }
    away_ = set_.away.hold(bytes_);
    if (homes_ == HomesBytes::kSame) {
      state_ = State::kHome;
      memory_.on_device = nullptr;
      garbage.memory = std::exchange(memory_.data, {});
    } else {
      state_ = State::kLeaving;
      box.unsafeGetStorageImpl()->_mutable_data_ptr_no_checks() = std::exchange(memory_.data, {});
      departure_ = set_.stash.hold(std::move(place), {std::exchange(memory_.on_device, nullptr), std::move(box),
                                                      home_.copied_out(), owner_, Stash::IfCopyFails::kStays});
    }
    return true;
  } catch (...) {
    log_warning("a managed storage could not leave the device");
    return false;
  }
}

bool ManagedStorage::evict(c10::intrusive_ptr<c10::StorageImpl>& reference) noexcept {
  if (uses_ > 0) {  // this thread may hold the lock, if the thread asks for the memory of these bytes
    return false;
  }
  if (storage_.use_count() == 1 && !may_refer_to(*storage_._unsafe_get_target())) {
    return false;
  }
  reference = storage_.lock();
  Garbage garbage{{}, reference};
  if (!mutex_.try_lock()) {
    return false;
  }
  std::optional<Stash::Number> departure;
  {
    const MutexLock lock(mutex_, std::adopt_lock);
    if (!leave_locked(garbage)) {
      return false;
    }
    if (state_ == State::kLeaving) {
      departure = departure_;
    }
  }
  if (departure) {
    set_.stash.release(*departure);
  }
  return true;
}

// kLeaving -> kArriving where the memory is still there, else kHome.
void ManagedStorage::come_back_locked() noexcept {
  if (state_ != State::kLeaving) {
    return;
  }
  std::optional<Stash::Departure> departure = set_.stash.take(departure_);
  if (!departure) {
    homes_ = HomesBytes::kSame;
    state_ = State::kHome;
    return;
  }
  memory_ = {std::move(departure->on_device),
             std::move(departure->memory.unsafeGetStorageImpl()->_mutable_data_ptr_no_checks())};
  away_ = {};
  state_ = State::kArriving;
  stay_after_failure_locked();
}

ManagedStorage::Memory ManagedStorage::take_memory() const {
  auto on_device = std::make_shared<Gauge::Lease>(set_.on_device.hold(bytes_));
  return {std::move(on_device), set_.tier.allocate(bytes_, owner_)};
}

void ManagedStorage::start_copy_in_locked(Memory& memory) {
  home_.copy_in(memory.data.get(), owner_);
  memory_ = std::move(memory);
  away_ = {};
  state_ = State::kArriving;
}

// If the copy out is known to have failed, the bytes stay on the device for good.
void ManagedStorage::stay_after_failure_locked() {
  if (homes_ != HomesBytes::kUnderWay || !is_done(home_.copied_out())) {
    return;
  }
  homes_ = HomesBytes::kSame;
  if (const std::optional<std::string> failure = failure_of(home_.copied_out())) {
    log_warning("a managed storage stays on the device, because its copy home has failed: " + *failure);
    homes_ = HomesBytes::kOld;
    home_.forget_copy_out();
    stays_now_ = true;
  }
}

// kArriving, kLeaving -> kHome, whatever the home has; nothing in any other state. `after_out`: the name of the wait
// for a copy out. The result is to be destroyed after the mutex is released.
c10::DataPtr ManagedStorage::drop_locked(WaitPoint after_out) noexcept {
  come_back_locked();
  if (state_ != State::kArriving) {
    return {};
  }
  if (homes_ == HomesBytes::kUnderWay) {
    set_.tier.wait_or_block(after_out, owner_, home_.copied_out());
    homes_ = HomesBytes::kSame;
  } else {
    set_.tier.wait_or_block(WaitPoint::kUnusedAfterIn, owner_, home_.copied_in());
  }
  state_ = State::kHome;
  memory_.on_device = nullptr;
  away_ = set_.away.hold(bytes_);
  return std::exchange(memory_.data, {});
}

// To an observer. What the bytes were in before they first left is the program's, which orders all its streams itself.
void ManagedStorage::report_use_locked(c10::Stream stream) {
  if (home_.copied_in() != nullptr) {
    set_.tier.used(stream, data_, bytes_);
  }
}

// Has the stream that the memory goes back to wait for the other streams' uses. An observer hears of these uses here:
// where the program ends the storage instead, the program has ordered them before the end.
void ManagedStorage::wait_for_users_locked() {
  for (const c10::Stream user : users_) {
    report_use_locked(user);
    set_.tier.wait(WaitPoint::kFreeAfterUsers, owner_, set_.tier.record(user));
  }
  users_.clear();
}

// Whether the program has resized the storage, or given it memory, while the bytes were not installed.
bool ManagedStorage::is_replaced_while_away_locked(c10::StorageImpl& storage) const {
  return state_ != State::kInstalled && (data_without_checks(storage) != nullptr || storage.nbytes() != bytes_);
}

// kInstalled -> kReleased where the program has resized the storage, or given it other memory.
void ManagedStorage::release_if_replaced_locked(c10::StorageImpl& storage) {
  const bool is_as_installed = data_without_checks(storage) == data_ && storage.nbytes() == bytes_;
  if (state_ == State::kInstalled && !is_as_installed) {
    refuse_access(storage, false);
    state_ = State::kReleased;
    memory_.on_device = nullptr;
  }
}

}  // namespace ebb

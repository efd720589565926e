#include "offload/managed/managed_set.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

#include <c10/core/Allocator.h>
#include <c10/util/Exception.h>

#include "offload/base/interpreter.h"
#include "offload/base/log.h"
#include "offload/recording/step_recorder.h"
#include "offload/recording/use_log.h"
#include "offload/steps/steps.h"
#include "policy/managed_use.h"
#include "streams/base/process_mark.h"

namespace ebb {
namespace {

// from_blob makes memory without a context, or one with a function that is called at the end.
bool belongs_to_others(const c10::DataPtr& data) {
  static const c10::DeleterFnPtr calls_function = c10::InefficientStdFunctionContext::makeDataPtr(
                                                      nullptr, [](void* /*data*/) {}, c10::kCPU)
                                                      .get_deleter();
  return data.get_context() == nullptr || data.get_deleter() == calls_function;
}

UseOrder::Where where_of(const ManagedStorage* storage) {
  using Where = UseOrder::Where;
  if (storage == nullptr) {
    return Where::kNowhere;
  }
  return storage->is_here() ? Where::kHere : storage->is_away() ? Where::kAway : Where::kNowhere;
}

}  // namespace

ManagedSet::ManagedSet(std::shared_ptr<Residency> residency, Steps& steps, Limits limits)
    : residency_(std::move(residency)),
      steps_(steps),
      limits_(limits),
      device_bytes_(limits.device_bytes),
      shared_(*residency_) {}

bool ManagedSet::takes(const at::Tensor& tensor) const {
  return tensor.defined() && tensor.layout() == c10::kStrided && !tensor.is_nested() && tensor.has_storage() &&
         tensor.device() == residency_->tier().device() && tensor.storage().nbytes() > 0 &&
         tensor.storage().nbytes() >= limits_.minimum_bytes;
}

ManagedSet::Slot ManagedSet::make_slot() {
  std::uint32_t item = 0;
  {
    const MutexLock lock(mutex_);
    if (free_items_.empty()) {
      item = static_cast<std::uint32_t>(storages_.size());
      order_.add(item);
      storages_.emplace_back();
    } else {
      item = free_items_.back();
      free_items_.pop_back();
    }
  }
  return {new std::uint32_t(item), [set = weak_from_this()](const std::uint32_t* number) {
            const std::unique_ptr<const std::uint32_t> ended(number);
            const std::shared_ptr<ManagedSet> here = set.lock();
            if (here != nullptr && !here->residency_->forked()) {  // a parent's thread may have held the mutex
              const MutexLock lock(here->mutex_);
              here->free_items_.push_back(*number);
            }
          }};
}

ManagedSet::Stored ManagedSet::exchange_stored(std::uint32_t item, Stored storage) {
  storage.swap(storages_[item]);
  sort_in(item);
  return storage;
}

// Called after each change of where the storage is, so that order_ is right at last, whatever other threads do.
void ManagedSet::sort_in(std::uint32_t item) noexcept { order_.put(item, where_of(storages_[item].get())); }

void ManagedSet::sort_in(const ManagedStorage& storage) noexcept {
  const MutexLock lock(mutex_);
  if (storages_[storage.item()].get() == &storage) {
    sort_in(storage.item());
  }
}

// Otherwise sorts the item in.
bool ManagedSet::is_there(const UseOrder::Key& key, UseOrder::Where where) {
  const bool is_there = where_of(storages_[key.item].get()) == where;
  if (!is_there) {
    sort_in(key.item);
  }
  return is_there;
}

std::uint64_t ManagedSet::fetched_ahead_bytes() const {
  return limits_.prefetch_bytes.value_or(fetched_ahead(device_bytes_));
}

std::shared_ptr<ManagedStorage> ManagedSet::add(const c10::Storage& storage, Slot slot,
                                                std::vector<c10::Stream> used_on) {
  const bool follows = slot != nullptr;
  residency_->check_process();
  if (belongs_to_others(storage.data_ptr())) {
    throw std::invalid_argument(
        "ebb: memory that LibTorch does not own (from_blob, a numpy array's) cannot be managed: take a copy first, "
        "such as parameter.data = parameter.data.clone()");
  }
  Stored ended;  // destroyed after the lock is released, and before a home is looked for
  if (slot != nullptr) {
    const MutexLock lock(mutex_);
    const Stored& there = storages_[*slot];
    if (there != nullptr && there->is_alive()) {
      slot = nullptr;
    } else {
      ended = exchange_stored(*slot, nullptr);
    }
  }
  ended = nullptr;
  std::optional<Block> home = residency_->tier().try_acquire(storage.nbytes());
  if (!home) {
    return nullptr;
  }
  if (slot == nullptr) {
    slot = make_slot();
  }
  Stored managed = make_shared_unless_forked<ManagedStorage>(shared_, storage, *std::move(home), std::move(slot),
                                                             std::move(used_on));
  const MutexLock lock(mutex_);
  ended = exchange_stored(managed->item(), managed);
  largest_ = std::max(largest_, storage.nbytes());
  if (log_ != nullptr) {
    log_->made(managed->item(), storage.nbytes(), follows);
  }
  return managed;
}

void ManagedSet::remove(const Stored& storage) {
  Stored removed;  // destroyed after the lock is released
  const std::uint32_t item = storage->item();
  const MutexLock lock(mutex_);
  if (storages_[item] == storage) {
    removed = exchange_stored(item, nullptr);
  }
}

Gauge::Lease ManagedSet::keep(std::uint64_t bytes) {
  residency_->check_process();
  const MutexLock lock(mutex_);
  Gauge& resident = residency_->managed_resident();
  const std::uint64_t held = resident.now_bytes();
  if (held > limits_.resident_bytes || bytes > limits_.resident_bytes - held) {
    return {};
  }
  return resident.hold(bytes);
}

bool ManagedSet::bring(std::span<const Use> uses, c10::Stream stream) {
  TORCH_CHECK(
      !residency_->tier().captures(),
      "ebb: an operation on a managed tensor cannot be part of a CUDA graph: the graph would keep the address of "
      "memory that comes and goes");
  const bool waits = !std::ranges::all_of(uses, [](const Use& use) { return use.storage->is_installed(); });
  const std::shared_ptr<UseLog> log = waits ? this->log() : nullptr;
  const std::shared_ptr<StepRecorder> recorder = log == nullptr ? nullptr : log->recorder_on(stream);
  const StepRecorder::ClockPause pause(recorder.get(), StepRecorder::ClockPause::kManaged);
  const bool is_news = note_operation(uses);
  for (const Use& use : uses) {
    const Stored& storage = use.storage;
    if (storage->needs_memory()) {
      residency_->ledger().counters().managed_fetched_late.add(storage->bytes());
      // A use gets its bytes, room or not.
      static_cast<void>(make_room(storage->bytes(), /*needed_in=*/0, CopiesHome::kMakeStreamsWait));
    }
    bring_one(*storage, stream);
  }
  return is_news && prefetch_expected(CopiesHome::kGiveUp, uses.size()) == Room::kNotYet &&
         !residency_->tier().device().is_cpu();
}

void ManagedSet::end(std::span<const Use> uses) noexcept {
  for (const Use& use : uses) {
    use.storage->end_use(use.written);
  }
  const MutexLock lock(mutex_);
  for (const Use& use : uses) {
    if (storages_[use.storage->item()] == use.storage) {
      sort_in(use.storage->item());
    }
  }
}

void ManagedSet::prefetch() noexcept {
  const WithoutInterpreterLock without;
  const std::shared_ptr<UseLog> log = this->log();
  const std::shared_ptr<StepRecorder> recorder =
      log == nullptr ? nullptr : log->recorder_on(residency_->tier().current_stream());
  const StepRecorder::ClockPause pause(recorder.get(), StepRecorder::ClockPause::kManaged);
  try {
    static_cast<void>(prefetch_expected(CopiesHome::kBlock, 1));
  } catch (...) {
    log_warning("a managed storage could not be prefetched; whoever uses the bytes fetches them");
  }
}

void ManagedSet::bring_one(ManagedStorage& storage, c10::Stream stream) {
  try {
    storage.bring(stream);
    return;
  } catch (const c10::OutOfMemoryError&) {
    send_home();
    drain();
    make_saves_leave(storage.bytes());
  }
  storage.bring(stream);
}

// As far as possible, lets go of so many bytes of saved storages on the device.
void ManagedSet::make_saves_leave(std::uint64_t bytes) {
  DeviceAccount& account = *residency_->ledger().account();
  const std::uint64_t before = account.held.now_bytes();
  const auto enough = [&] { return account.held.now_bytes() + bytes <= before; };
  residency_->stash().drain();
  ++account.evictions;
  steps_.make_room(enough);
  steps_.evict(enough);
}

// Returns whether what is expected next may have changed.
bool ManagedSet::note_operation(std::span<const Use> uses) {
  std::vector<Stored> dead;                                 // destroyed after the lock is released
  std::vector<c10::intrusive_ptr<c10::StorageImpl>> ended;  // the same
  bool is_news = false;
  const MutexLock lock(mutex_);
  ended.swap(references_);
  if (log_ != nullptr) {
    log_->operation_begins();
  }
  for (const Use& use : uses) {
    const std::uint32_t item = use.storage->item();
    if (log_ != nullptr) {
      log_->use(item, use.storage->bytes(), use.written);
    }
    is_news = order_.use(item, use.storage->bytes(), fetched_ahead_bytes()) || is_news;
    constexpr int kLookedAtAUse = 4;  // what has ended keeps its home until somebody looks
    for (int i = 0; i < kLookedAtAUse; ++i) {
      next_looked_at_ = (next_looked_at_ + 1) % static_cast<std::uint32_t>(storages_.size());
      take_if_dead(next_looked_at_, dead);
    }
  }
  return is_news;
}

std::shared_ptr<UseLog> ManagedSet::log() {
  const MutexLock lock(mutex_);
  return log_;
}

void ManagedSet::log_to(std::shared_ptr<UseLog> log) {
  const MutexLock lock(mutex_);
  log_.swap(log);
}

// Sends home what is expected later than in `needed_in` uses, the last first, until `bytes` more fit. kNotYet: they
// will fit when copies home are done.
ManagedSet::Room ManagedSet::make_room(std::uint64_t bytes, std::uint64_t needed_in, CopiesHome copies) {
  const std::uint64_t limit = device_bytes_;
  const std::uint64_t limit_of_staying = stays_of(limit);
  while (shared_.on_device.now_bytes() + bytes > limit) {
    const std::uint64_t stays = staying_bytes();
    if (stays + bytes > limit_of_staying) {
      if (const auto last = last_expected(needed_in)) {
        if (!send_home(last->storage) && last->storage->can_leave()) {
          if (last->storage->is_alive()) {
            return Room::kNotThere;
          }
          forget_the_dead();
        }
        continue;
      }
    }
    if (shared_.stash.sweep_oldest()) {
      continue;
    }
    if (stays + bytes > limit) {
      if (copies == CopiesHome::kMakeStreamsWait) {  // what an operation needs beyond the bound is there alone
        drain();
      }
      return Room::kNotThere;
    }
    // All that is in the way is copies home that are under way.
    if (copies == CopiesHome::kGiveUp) {
      return Room::kNotYet;
    }
    static_cast<void>(copies == CopiesHome::kBlock ? shared_.stash.block_for_oldest()
                                                   : shared_.stash.let_go_of_oldest());
  }
  return Room::kThere;
}

// Of what is on the device, what no copy home has been started of.
std::uint64_t ManagedSet::staying_bytes() const {
  const std::uint64_t held = shared_.on_device.now_bytes();
  return held - std::min(held, shared_.stash.gauge().now_bytes());
}

// Of the storages on the device that are not in use, the one that is expected last, or last before `before`, if that is
// later than in `needed_in` uses.
std::optional<ManagedSet::Expected> ManagedSet::last_expected(std::uint64_t needed_in,
                                                              const std::optional<UseOrder::Key>& before) {
  constexpr auto kHere = UseOrder::Where::kHere;
  const MutexLock lock(mutex_);
  auto key = order_.last(kHere, before);
  while (key && order_.uses_until(*key) > needed_in) {
    const Stored& storage = storages_[key->item];
    if (is_there(*key, kHere) && storage->can_leave()) {
      return Expected{*key, storage};
    }
    key = order_.last(kHere, key);
  }
  return std::nullopt;
}

// kThere: what is expected next is under way, or nothing is away.
ManagedSet::Room ManagedSet::prefetch_expected(CopiesHome copies, std::size_t most) {
  if (shared_.away.now_bytes() == 0) {
    return Room::kThere;
  }
  constexpr std::size_t kAtLeast = 16;  // beside as many as are used
  const std::vector<Wanted> wanted = expected_from_home(kAtLeast + most);
  leave_ahead(wanted);
  const Prefetching here;  // evicts nothing
  for (const Wanted& each : wanted) {
    if (!each.is_fetched_now) {
      break;
    }
    const bool is_at_home = each.storage->needs_memory();
    const Room room = is_at_home ? make_room(each.storage->bytes(), each.in, copies) : Room::kThere;
    if (room != Room::kThere) {
      return room;
    }
    const bool is_under_way = each.storage->prefetch();
    sort_in(*each.storage);
    if (!is_under_way) {
      return Room::kNotThere;
    }
    if (is_at_home) {
      residency_->ledger().counters().managed_prefetched.add(each.storage->bytes());
    }
  }
  return Room::kThere;
}

// Of the next uses, which storages are not on the device, as far ahead as copies home are started, and at most so many.
std::vector<ManagedSet::Wanted> ManagedSet::expected_from_home(std::size_t most) {
  constexpr auto kAway = UseOrder::Where::kAway;
  constexpr std::size_t kMostLookedAt = 256;
  const std::uint64_t fetched = fetched_ahead_bytes();
  std::vector<Wanted> wanted;
  const MutexLock lock(mutex_);
  std::size_t looks = kMostLookedAt + most;
  for (auto key = order_.first(kAway, std::nullopt, looks); key && wanted.size() < most;
       key = order_.first(kAway, key, looks)) {
    --looks;
    const std::uint64_t ahead = order_.bytes_until(*key);
    if (key->next == UseHistory::kNever || ahead > fetched + largest_) {
      break;
    }
    const Stored& storage = storages_[key->item];
    if (is_there(*key, kAway) && storage->is_alive() && !storage->is_about_to_change()) {
      wanted.push_back({storage, order_.uses_until(*key), ahead <= fetched});
    }
  }
  return wanted;
}

// Starts the copies home that make room for all of these, if nothing else is expected earlier. What the home has
// already needs no copy, and so stays until the room is asked for.
void ManagedSet::leave_ahead(const std::vector<Wanted>& wanted) {
  std::optional<UseOrder::Key> before;
  std::uint64_t bytes = 0;
  std::uint64_t needs_no_copy = 0;
  for (const Wanted& each : wanted) {
    bytes += each.storage->bytes();
    while (staying_bytes() + bytes > device_bytes_ + needs_no_copy) {
      const std::optional<Expected> last = last_expected(each.in, before);
      if (!last) {
        return;
      }
      before = last->key;
      if (last->storage->home_has_bytes()) {
        needs_no_copy += last->storage->bytes();
      } else if (!send_home(last->storage)) {
        return;
      }
    }
  }
}

void ManagedSet::send_home() {
  std::vector<Stored> all;
  {
    const MutexLock lock(mutex_);
    all = storages_;
  }
  for (const Stored& each : all) {
    if (each != nullptr) {
      send_home(each);
    }
  }
}

void* ManagedSet::begin_use_at_home(const Stored& storage) {
  send_home(storage);
  storage->wait_for_copies_at_home();
  return storage->begin_use_at_home();
}

bool ManagedSet::send_home(const Stored& storage) {
  const bool leaves = storage->leave();
  if (leaves) {
    sort_in(*storage);
  }
  return leaves;
}

void ManagedSet::let_go(const std::function<bool()>& enough) {
  while (!enough() && shared_.stash.let_go_of_oldest()) {
  }
  std::optional<Expected> last;
  while (!enough() && (last = last_expected(0, last ? std::optional(last->key) : std::nullopt))) {
    evict(*last->storage);
  }
}

void ManagedSet::evict(ManagedStorage& storage) {
  c10::intrusive_ptr<c10::StorageImpl> reference;
  if (storage.evict(reference)) {
    sort_in(storage);
    residency_->ledger().counters().managed_evicted.add(storage.bytes());
  }
  if (reference && reference->pyobj_slot()->load_pyobj() != nullptr) {
    const MutexLock lock(mutex_);
    references_.push_back(std::move(reference));
  }
}

void ManagedSet::add_to(Stats& stats) {
  stats.managed_on_device.capacity_bytes = device_bytes_;
  stats.managed_resident.capacity_bytes = limits_.resident_bytes;
  const MutexLock lock(mutex_);
  for (const Stored& each : storages_) {
    if (each != nullptr && each->is_alive()) {
      ++stats.managed.tensors;
      stats.managed.bytes += each->bytes();
    }
  }
}

void ManagedSet::end_references() noexcept {
  std::vector<c10::intrusive_ptr<c10::StorageImpl>> ended;  // destroyed after the lock is released
  const MutexLock lock(mutex_);
  ended.swap(references_);
}

void ManagedSet::forget_the_dead() {
  std::vector<Stored> dead;  // destroyed after the lock is released
  const MutexLock lock(mutex_);
  for (std::uint32_t item = 0; item < storages_.size(); ++item) {
    take_if_dead(item, dead);
  }
}

void ManagedSet::take_if_dead(std::uint32_t item, std::vector<Stored>& dead) {
  if (storages_[item] != nullptr && !storages_[item]->is_alive()) {
    dead.push_back(exchange_stored(item, nullptr));
  }
}

}  // namespace ebb

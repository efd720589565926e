#include "offload/managed/managed_set.h"

#include <algorithm>
#include <stdexcept>
#include <thread>
#include <utility>

#include <c10/core/Allocator.h>
#include <c10/util/Exception.h>

#include "offload/base/interpreter.h"
#include "offload/base/log.h"
#include "offload/recording/step_recorder.h"
#include "policy/managed_room.h"
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
  return storage->is_here()                               ? Where::kHere
         : storage->is_at_home() || storage->is_leaving() ? Where::kAway
                                                          : Where::kNowhere;
}

}  // namespace

ManagedSet::ManagedSet(std::shared_ptr<Residency> residency, Limits limits)
    : residency_(std::move(residency)), limits_(limits), device_bytes_(limits.device_bytes) {}

bool ManagedSet::takes(const at::Tensor& tensor) const {
  return tensor.defined() && tensor.layout() == c10::kStrided && !tensor.is_nested() && tensor.has_storage() &&
         tensor.device() == residency_->tier().device() && tensor.storage().nbytes() > 0 &&
         tensor.storage().nbytes() >= limits_.minimum_bytes;
}

ManagedSet::Slot ManagedSet::make_slot() {
  const MutexLock lock(mutex_);
  const std::uint32_t item = take_item();
  in_slot_[item] = true;
  return {new std::uint32_t(item), [set = weak_from_this()](const std::uint32_t* number) {
            const std::unique_ptr<const std::uint32_t> ended(number);
            if (const std::shared_ptr<ManagedSet> here = set.lock()) {
              here->give_back(*number);
            }
          }};
}

std::uint32_t ManagedSet::take_item() {
  if (free_items_.empty()) {
    order_.add(static_cast<std::uint32_t>(storages_.size()));
    storages_.emplace_back();
    in_slot_.push_back(false);
    return static_cast<std::uint32_t>(storages_.size() - 1);
  }
  const std::uint32_t item = free_items_.back();
  free_items_.pop_back();
  return item;
}

ManagedSet::Stored ManagedSet::exchange_stored(std::uint32_t item, Stored storage) {
  storage.swap(storages_[item]);
  sort_in(item);
  return storage;
}

// Called after each change of where the storage is, so that order_ is right at last, whatever other threads do.
void ManagedSet::sort_in(std::uint32_t item) noexcept {
  order_.put(item, where_of(storages_[item].get()), history_.next_place(item));
}

void ManagedSet::sort_in(const ManagedStorage& storage) noexcept {
  const MutexLock lock(mutex_);
  if (storages_[storage.item()].get() == &storage) {
    sort_in(storage.item());
  }
}

// Otherwise sorts the item in: where the history goes on from another place, the next use of everything is another.
bool ManagedSet::is_sorted_in(const UseOrder::Key& key, UseOrder::Where where) {
  const bool is_sorted = history_.next_place(key.item) == key.next && where_of(storages_[key.item].get()) == where;
  if (!is_sorted) {
    sort_in(key.item);
  }
  return is_sorted;
}

std::uint64_t ManagedSet::fetched_ahead_bytes() const {
  return limits_.prefetch_bytes.value_or(fetched_ahead(device_bytes_));
}

// Of a slot. What lives there still keeps the item.
void ManagedSet::give_back(std::uint32_t item) {
  if (residency_->forked()) {  // another thread of the parent may have held the mutex
    return;
  }
  Stored dead;  // destroyed after the lock is released
  const MutexLock lock(mutex_);
  in_slot_[item] = false;
  if (storages_[item] == nullptr || !storages_[item]->is_alive()) {
    dead = exchange_stored(item, nullptr);
    free_items_.push_back(item);
  }
}

std::shared_ptr<ManagedStorage> ManagedSet::add(const c10::Storage& storage, const Slot& slot,
                                                std::vector<c10::Stream> used_on) {
  residency_->check_process();
  if (belongs_to_others(storage.data_ptr())) {
    throw std::invalid_argument(
        "ebb: memory that LibTorch does not own (from_blob, a numpy array's) cannot be managed: take a copy first, "
        "such as parameter.data = parameter.data.clone()");
  }
  Stored ended;  // destroyed after the lock is released, and before a home is looked for
  std::optional<std::uint32_t> item;
  if (slot != nullptr) {
    const MutexLock lock(mutex_);
    const Stored& there = storages_[*slot];
    if (there == nullptr || !there->is_alive()) {
      ended = exchange_stored(*slot, nullptr);
      item = *slot;
    }
  }
  ended = nullptr;
  std::optional<Block> home = residency_->tier().try_acquire(storage.nbytes());
  if (!home) {
    return nullptr;
  }
  if (!item) {
    const MutexLock lock(mutex_);
    item = take_item();
  }
  Stored managed = make_shared_unless_forked<ManagedStorage>(residency_->tier(), gauges_, storage, *std::move(home),
                                                             *item, std::move(used_on));
  const MutexLock lock(mutex_);
  static_cast<void>(exchange_stored(*item, managed));
  largest_ = std::max(largest_, storage.nbytes());
  if (log_) {
    log_->made(*item, storage.nbytes(), /*follows=*/slot != nullptr);
  }
  return managed;
}

void ManagedSet::remove(const Stored& storage) {
  Stored removed;  // destroyed after the lock is released
  const std::uint32_t item = storage->item();
  const MutexLock lock(mutex_);
  if (storages_[item] == storage) {
    removed = exchange_stored(item, nullptr);
    if (!in_slot_[item]) {
      free_items_.push_back(item);
    }
  }
}

std::optional<Gauge::Lease> ManagedSet::keep(std::uint64_t bytes) {
  residency_->check_process();
  const MutexLock lock(mutex_);
  const std::uint64_t held = resident_.now_bytes();
  if (held > limits_.resident_bytes || bytes > limits_.resident_bytes - held) {
    return std::nullopt;
  }
  return resident_.hold(bytes);
}

bool ManagedSet::bring(std::span<const Use> uses, c10::Stream stream) {
  TORCH_CHECK(
      !residency_->tier().captures(),
      "ebb: an operation on a managed tensor cannot be part of a CUDA graph: the graph would keep the address of "
      "memory that comes and goes");
  const bool waits = !std::ranges::all_of(uses, [](const Use& use) { return use.storage->is_installed(); });
  const std::shared_ptr<StepRecorder> recorder = waits ? recorder_on(stream) : nullptr;
  const StepRecorder::ClockPause pause(recorder.get(), StepRecorder::ClockPause::kManaged);
  begin_operation();
  bool is_news = false;
  for (const Use& use : uses) {
    const Stored& storage = use.storage;
    is_news = note_use(use) || is_news;
    if (storage->is_at_home()) {
      fetched_late_.add(storage->bytes());
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
  const std::shared_ptr<StepRecorder> recorder = recorder_on(residency_->tier().current_stream());
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
    residency_->evict(storage.bytes());
  }
  storage.bring(stream);
}

// Returns whether what is expected next may have changed.
bool ManagedSet::note_use(const Use& use) {
  std::vector<Stored> dead;  // destroyed after the lock is released
  const MutexLock lock(mutex_);
  if (log_) {
    log_->use(use.storage->item(), use.storage->bytes(), use.written);
  }
  const std::uint32_t item = use.storage->item();
  const bool is_news = history_.use(item, use.storage->bytes(), fetched_ahead_bytes());
  order_.put(item, UseOrder::Where::kNowhere, history_.next_place(item));
  // After a jump back in the history, what is used soon may be sorted as if used late, where nobody looks. And what has
  // ended keeps its home until somebody looks.
  constexpr int kLookedAtAUse = 4;
  for (int i = 0; i < kLookedAtAUse; ++i) {
    next_looked_at_ = (next_looked_at_ + 1) % static_cast<std::uint32_t>(storages_.size());
    if (next_looked_at_ != item) {
      sort_in(next_looked_at_);
      take_if_dead(next_looked_at_, dead);
    }
  }
  return is_news;
}

void ManagedSet::begin_operation() {
  std::vector<c10::intrusive_ptr<c10::StorageImpl>> ended;  // destroyed after the lock is released
  const MutexLock lock(mutex_);
  ended.swap(references_);
  if (log_) {
    log_->operation_begins();
  }
}

void ManagedSet::step_begins() {
  const MutexLock lock(mutex_);
  if (!log_) {
    log_.emplace();
  }
  log_->step_begins();
}

void ManagedSet::record_by(const std::shared_ptr<StepRecorder>& recorder) {
  const MutexLock lock(mutex_);
  recorder_ = recorder;
}

void ManagedSet::backward_begins() {
  const MutexLock lock(mutex_);
  if (log_) {
    log_->backward_begins();
  }
}

void ManagedSet::backward_is_over(bool failed) {
  const MutexLock lock(mutex_);
  if (log_) {
    log_->backward_is_over(failed);
  }
}

std::optional<std::vector<ManagedUse>> ManagedSet::last_period() {
  const MutexLock lock(mutex_);
  return log_ ? log_->last_period() : std::nullopt;
}

// The recorder of the step that is under way, if the step's clock is this stream's.
std::shared_ptr<StepRecorder> ManagedSet::recorder_on(c10::Stream stream) {
  const std::shared_ptr<StepRecorder> recorder = [&] {
    const MutexLock lock(mutex_);
    return recorder_.lock();
  }();
  return recorder != nullptr && recorder->is_on(stream) ? recorder : nullptr;
}

// Sends home what is expected later than in `needed_in` uses, the last first, until `bytes` more fit. kNotYet: they
// will fit when copies home are done.
ManagedSet::Room ManagedSet::make_room(std::uint64_t bytes, std::uint64_t needed_in, CopiesHome copies) {
  const std::uint64_t limit = device_bytes_;
  const std::uint64_t limit_of_staying = stays_of(limit);
  while (gauges_.on_device.now_bytes() + bytes > limit) {
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
    if (let_go_of_oldest_arrived()) {
      continue;
    }
    if (stays + bytes > limit) {
      if (copies == CopiesHome::kMakeStreamsWait) {  // what an operation needs beyond the bound is there alone
        wait_for_leaving(0);
      }
      return Room::kNotThere;
    }
    // All that is in the way is copies home that are under way.
    if (copies == CopiesHome::kGiveUp) {
      return Room::kNotYet;
    }
    const bool goes_on = copies == CopiesHome::kBlock ? block_for_oldest() : wait_for_leaving(limit - stays - bytes);
    if (!goes_on) {
      std::this_thread::yield();
    }
  }
  return Room::kThere;
}

// Of what is on the device, what no copy home has been started of.
std::uint64_t ManagedSet::staying_bytes() const {
  const std::uint64_t held = gauges_.on_device.now_bytes();
  return held - std::min(held, gauges_.leaving.now_bytes());
}

// Of the storages on the device that are not in use, the one that is expected last, or last before `before`, if that is
// later than in `needed_in` uses.
std::optional<ManagedSet::Expected> ManagedSet::last_expected(std::uint64_t needed_in,
                                                              const std::optional<UseOrder::Key>& before) {
  constexpr auto kHere = UseOrder::Where::kHere;
  const MutexLock lock(mutex_);
  for (auto key = order_.last(kHere, before); key;) {
    if (!is_sorted_in(*key, kHere)) {  // the item may be used last of all now
      key = order_.last(kHere, before);
      continue;
    }
    if (history_.uses_until(key->next) <= needed_in) {
      return std::nullopt;
    }
    if (const Stored& storage = storages_[key->item]; storage->can_leave()) {
      return Expected{*key, storage};
    }
    key = order_.last(kHere, key);
  }
  return std::nullopt;
}

// kThere: what is expected next is under way, or nothing is away.
ManagedSet::Room ManagedSet::prefetch_expected(CopiesHome copies, std::size_t most) {
  if (gauges_.at_home.now_bytes() == 0 && gauges_.leaving.now_bytes() == 0) {
    return Room::kThere;
  }
  constexpr std::size_t kAtLeast = 16;  // beside as many as are used
  const std::vector<Wanted> wanted = expected_from_home(kAtLeast + most);
  leave_ahead(wanted);
  const Residency::Prefetching here;  // evicts nothing
  for (const Wanted& each : wanted) {
    if (!each.is_fetched_now) {
      break;
    }
    const bool is_at_home = each.storage->is_at_home();
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
      prefetched_.add(each.storage->bytes());
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
  std::size_t looked_at = 0;
  for (auto key = order_.first(kAway, std::nullopt); key && looked_at < kMostLookedAt + most && wanted.size() < most;
       key = order_.first(kAway, key), ++looked_at) {
    if (!is_sorted_in(*key, kAway)) {
      continue;
    }
    const std::uint64_t ahead = history_.bytes_until(key->next);
    if (key->next == UseHistory::kNever || ahead > fetched + largest_) {
      break;
    }
    const Stored& storage = storages_[key->item];
    if (storage->is_alive() && !storage->is_about_to_change()) {
      wanted.push_back({storage, history_.uses_until(key->next), ahead <= fetched});
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
  void* const bytes = storage->begin_use_at_home();
  if (bytes != nullptr) {
    forget_leaving(storage);
  }
  return bytes;
}

bool ManagedSet::send_home(const Stored& storage) {
  if (!storage->leave()) {
    return false;
  }
  sort_in(*storage);
  if (storage->is_leaving()) {
    try {
      const MutexLock lock(mutex_);
      leaving_.push_back(storage);
    } catch (...) {
      storage->arrive_home(ManagedStorage::Wait::kYes);
      sort_in(*storage);
      throw;
    }
  }
  return true;
}

void ManagedSet::let_go(const std::function<bool()>& enough) {
  while (!enough()) {
    const Stored oldest = oldest_leaving();
    if (oldest == nullptr || (oldest->is_leaving() && !evict(*oldest))) {
      break;
    }
    forget_leaving(oldest);
  }
  std::optional<Expected> last;
  while (!enough() && (last = last_expected(0, last ? std::optional(last->key) : std::nullopt))) {
    static_cast<void>(evict(*last->storage));
  }
}

// Returns whether the memory is let go of.
bool ManagedSet::evict(ManagedStorage& storage) {
  c10::intrusive_ptr<c10::StorageImpl> reference;
  const bool gone = storage.evict(reference);
  sort_in(storage);
  if (gone) {
    evicted_.add(storage.bytes());
  }
  if (reference && reference->pyobj_slot()->load_pyobj() != nullptr) {
    const MutexLock lock(mutex_);
    references_.push_back(std::move(reference));
  }
  return gone;
}

// Blocks the calling thread until the oldest copy home is done. Returns false as wait_for_leaving.
bool ManagedSet::block_for_oldest() {
  const Stored oldest = oldest_leaving();
  if (oldest == nullptr) {
    return false;
  }
  if (const Ticket copy = oldest->copy_home()) {
    try {
      copy->synchronize();
    } catch (...) {  // arrive_home() knows what to do
    }
  }
  static_cast<void>(let_go_of_oldest_arrived());
  return true;
}

// Lets go of the memory of the oldest of those that leave, if that one is home by now. Never waits.
bool ManagedSet::let_go_of_oldest_arrived() noexcept {
  const Stored oldest = oldest_leaving();
  if (oldest == nullptr || !oldest->arrive_home(ManagedStorage::Wait::kNo)) {
    return false;
  }
  forget_leaving(oldest);
  return true;
}

// Makes streams, or on a CPU the calling thread, wait for the oldest copies home until the memory of the others is
// within the limit. Returns false where another thread has yet to say what is leaving.
bool ManagedSet::wait_for_leaving(std::uint64_t limit_bytes) noexcept {
  while (gauges_.leaving.now_bytes() > limit_bytes) {
    const Stored oldest = oldest_leaving();
    if (oldest == nullptr) {
      return false;
    }
    oldest->arrive_home(ManagedStorage::Wait::kYes);
    forget_leaving(oldest);
  }
  return true;
}

// Null where nothing leaves.
ManagedSet::Stored ManagedSet::oldest_leaving() noexcept {
  const MutexLock lock(mutex_);
  return leaving_.empty() ? nullptr : leaving_.front();
}

// Of what has arrived, stayed or come back, unless it leaves once more. An entry would keep the home after the program
// has let go of the storage. The caller's reference outlives the lock, so no storage ends under it.
void ManagedSet::forget_leaving(const Stored& storage) noexcept {
  const MutexLock lock(mutex_);
  if (storage->is_leaving()) {
    return;
  }
  if (!leaving_.empty() && leaving_.front() == storage) {  // mostly; what came back and left again follows
    leaving_.pop_front();
  } else {
    std::erase(leaving_, storage);
  }
  if (storages_[storage->item()] == storage) {
    sort_in(storage->item());
  }
}

void ManagedSet::add_to(Stats& stats) {
  stats.managed_on_device = {on_device().now_bytes(), on_device().peak_bytes(), device_bytes_};
  stats.managed_prefetched = prefetched_.count();
  stats.managed_fetched_late = fetched_late_.count();
  stats.managed_resident = {resident_.now_bytes(), resident_.peak_bytes(), limits_.resident_bytes};
  stats.managed_evicted = evicted_.count();
  const MutexLock lock(mutex_);
  for (const Stored& each : storages_) {
    if (each != nullptr && each->is_alive()) {
      ++stats.managed.tensors;
      stats.managed.bytes += each->bytes();
    }
  }
}

std::uint64_t ManagedSet::home_bytes() {
  const MutexLock lock(mutex_);
  std::uint64_t bytes = 0;
  for (const Stored& each : storages_) {
    bytes += each == nullptr ? 0 : each->bytes();
  }
  return bytes;
}

void ManagedSet::reset_stats() {
  gauges_.on_device.reset_peak();
  resident_.reset_peak();
  prefetched_.reset();
  fetched_late_.reset();
  evicted_.reset();
}

void ManagedSet::end_references() noexcept {
  std::vector<c10::intrusive_ptr<c10::StorageImpl>> ended;  // destroyed after the lock is released
  const MutexLock lock(mutex_);
  ended.swap(references_);
}

void ManagedSet::forget_the_dead() {
  std::vector<Stored> dead;  // destroyed after the lock is released
  const MutexLock lock(mutex_);
  std::erase_if(leaving_, [&dead](const Stored& each) {  // the memory would be kept until its room is asked for
    const bool is_dead = !each->is_alive();
    if (is_dead) {
      dead.push_back(each);
    }
    return is_dead;
  });
  for (std::uint32_t item = 0; item < storages_.size(); ++item) {
    take_if_dead(item, dead);
  }
}

void ManagedSet::take_if_dead(std::uint32_t item, std::vector<Stored>& dead) {
  if (storages_[item] != nullptr && !storages_[item]->is_alive()) {
    if (!in_slot_[item]) {
      free_items_.push_back(item);
    }
    dead.push_back(exchange_stored(item, nullptr));
  }
}

}  // namespace ebb

#include "offload/cache/saved_bytes.h"

#include <algorithm>
#include <utility>

#include <c10/util/Exception.h>

#include "offload/base/references.h"

namespace ebb {

c10::Storage Source::lock() const {
  c10::intrusive_ptr<c10::StorageImpl> source = storage_.lock();
  if (!source || has_parted_ || source->nbytes() != bytes_ || (Recipe::runs_here() && was_swapped(*source))) {
    return {};
  }
  return c10::Storage(std::move(source));
}

SavedBytes::SavedBytes(Residency& residency, const Source& as_saved, c10::Storage source)
    : residency_(residency),
      as_saved_(as_saved),
      resident_(std::move(source)),
      on_device_(std::make_shared<Gauge::Lease>()),
      source_lease_(on_device_) {}

void SavedBytes::go(State from, State to) {
  TORCH_INTERNAL_ASSERT(state_ == from, "ebb: a saved storage is in state ", static_cast<int>(state_));
  state_ = to;
}

void SavedBytes::count_source(Gauge::Lease& lease) {
  if (on_device_ != nullptr && !*on_device_) {
    std::swap(*on_device_, lease);
  }
}

bool SavedBytes::source_has_changed() const {
  if (is_resident()) {
    return !as_saved_.has_parted() && !has_its_memory(resident_);
  }
  return state_ == State::kRestored && restored_.first->is_source() &&
         as_saved_.was_swapped(*restored_.first->storage().unsafeGetStorageImpl());
}

bool SavedBytes::is_the_last_to_hold_source() const {
  return references_to(resident_) == 1 && may_refer_to(*resident_.unsafeGetStorageImpl());
}

SavedBytes::Leaving SavedBytes::leave(Block block, c10::Stream stream) {
  TORCH_INTERNAL_ASSERT(is_resident());
  Stash::Place place = Stash::prepare(stream);
  HomeBlock home(residency_.tier(), std::move(block));
  home.copy_out(as_saved_.data(), stream);  // nothing may fail from here on
  home_.emplace(std::move(home));
  go(State::kResident, State::kOffDevice);
  return {std::move(place),
          {std::exchange(on_device_, nullptr), std::exchange(resident_, {}), home_->copied_out(), stream}};
}

SavedBytes::Dropped SavedBytes::drop(std::unique_ptr<Recipe> recipe) {
  recipe_ = std::move(recipe);
  go(State::kResident, State::kOffDevice);
  return {std::exchange(on_device_, nullptr), std::exchange(resident_, {})};
}

SavedBytes::Parted SavedBytes::part(c10::Storage copy) {
  Parted parted;
  std::erase_if(handed_out_,
                [this](const HandedOut& each) { return each.storage._unsafe_get_target() == as_saved_.identity(); });
  if (is_resident()) {
    parted.source = std::exchange(resident_, std::move(copy));
    return parted;
  }
  if (home_) {
    parted.copied_out = home_->copied_out();
  }
  if (state_ == State::kRestored && restored_.first->is_source()) {
    parted.restored = restored_.first;
    forget(parted.restored);
  }
  return parted;
}

c10::Storage SavedBytes::for_capture(const c10::Storage& source) const {
  c10::Storage there = is_resident() ? resident_ : source;
  TORCH_CHECK(there,
              "ebb: backward is captured in a CUDA graph and asks for a tensor that was saved, and moved, before the "
              "capture began. Capture forward and backward together, or put a NoOpGuard around that forward pass.");
  return there;
}

std::shared_ptr<Fetched> SavedBytes::restored_on(c10::Stream stream) const {
  if (state_ != State::kRestored) {
    return nullptr;
  }
  if (restored_.first->stream() == stream || !in_force(WaitPoint::kOwnStream)) {
    return restored_.first;
  }
  const auto found = std::ranges::find(restored_.on_other_streams, stream, &Fetched::stream);
  return found == restored_.on_other_streams.end() ? nullptr : *found;
}

c10::Storage SavedBytes::handed_out_on(c10::Stream stream) const {
  const auto found = std::ranges::find(handed_out_, stream, &HandedOut::stream);
  if (found == handed_out_.end()) {
    return {};
  }
  c10::intrusive_ptr<c10::StorageImpl> storage = found->storage.lock();
  if (!storage || storage->nbytes() != as_saved_.bytes() || storage->data() != found->data ||
      (Recipe::runs_here() && as_saved_.was_swapped(*storage))) {
    return {};
  }
  return c10::Storage(std::move(storage));
}

void SavedBytes::remember(const c10::Storage& storage, c10::Stream stream) {
  const auto known = std::ranges::find(handed_out_, stream, &HandedOut::stream);
  HandedOut& entry = known != handed_out_.end()
                         ? *known
                         : handed_out_.emplace_back(HandedOut{storage.getWeakStorageImpl(), nullptr, stream});
  if (entry.data != storage.data() || entry.storage.expired()) {
    entry.storage = storage.getWeakStorageImpl();
    entry.data = storage.data();
  }
}

void SavedBytes::lend_source() {
  lent_ = source_lease_.lock();
  count_if_still_held();
}

std::shared_ptr<Fetched> SavedBytes::held(c10::Storage source, c10::Stream stream, Gauge::Lease window) {
  count_if_still_held();
  std::shared_ptr<Gauge::Lease> lease = source_lease_.lock();
  if (lease == nullptr) {
    lease = std::make_shared<Gauge::Lease>(residency_.ledger().on_device().hold(as_saved_.bytes()));
  }
  return std::make_shared<Fetched>(residency_.tier(), std::move(source), stream, std::move(lease), std::move(window));
}

std::shared_ptr<Fetched> SavedBytes::fetch(c10::Storage memory, c10::Stream stream, Gauge::Lease window) {
  void* const to = memory.mutable_data();
  // Every call that may fail comes before the copy starts.
  auto fetched = std::make_shared<Fetched>(residency_.tier(), std::move(memory), stream, nullptr, std::move(window));
  home_->copy_in(to, stream);
  fetched->arrives(home_->copied_in());
  residency_.ledger().counters().fetched.add(as_saved_.bytes());
  return fetched;
}

std::shared_ptr<Fetched> SavedBytes::restore(std::shared_ptr<Fetched> fetched) {
  if (state_ == State::kRestored && !restored_.first->is_unclaimed()) {
    restored_.on_other_streams.push_back(std::move(fetched));
    return nullptr;
  }
  if (state_ != State::kRestored) {
    go(State::kOffDevice, State::kRestored);
  }
  return std::exchange(restored_.first, std::move(fetched));
}

SavedBytes::Copies SavedBytes::release() noexcept {
  if (state_ == State::kRestored) {
    state_ = State::kOffDevice;
    lent_ = restored_.first->is_source() ? source_lease_.lock() : nullptr;
  }
  return std::exchange(restored_, {});
}

std::shared_ptr<Fetched> SavedBytes::cancel() noexcept {
  if (state_ != State::kRestored || !restored_.first->is_unclaimed()) {
    return nullptr;
  }
  state_ = State::kOffDevice;
  return std::exchange(restored_.first, nullptr);
}

void SavedBytes::forget(const std::shared_ptr<Fetched>& failed) noexcept {
  std::erase(restored_.on_other_streams, failed);
  if (state_ != State::kRestored || restored_.first != failed) {
    return;
  }
  restored_.first = nullptr;
  if (restored_.on_other_streams.empty()) {
    state_ = State::kOffDevice;
  } else {
    restored_.first = std::move(restored_.on_other_streams.back());
    restored_.on_other_streams.pop_back();
  }
}

// Of a source that is alive: whether the stash has let go of it, so that the program has it.
void SavedBytes::count_if_still_held() {
  if (source_lease_.expired()) {
    residency_.ledger().counters().still_held.add(as_saved_.bytes());
  }
}

}  // namespace ebb

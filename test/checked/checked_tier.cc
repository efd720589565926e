#include "test/checked/checked_tier.h"

#include <atomic>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "streams/base/mutex.h"
#include "streams/base/process_mark.h"
#include "test/checked/happens_before.h"
#include "test/checked/watched_cuda_memory.h"

namespace ebb {
namespace {

HappensBefore& order() { return HappensBefore::instance(); }

HappensBefore::Range device_range(const void* data, std::size_t bytes) {
  return {HappensBefore::kDevice, reinterpret_cast<std::uintptr_t>(data), bytes};
}

// A tier's ticket, and the clock that the ticket stands for. Once the host has learned that the ticket is done, all
// that follows comes behind it.
class CheckedTicket final : public Completion {
 public:
  CheckedTicket(Ticket ticket, HappensBefore::Clock clock) : ticket_(std::move(ticket)), clock_(std::move(clock)) {}

  [[nodiscard]] bool done() const noexcept override {
    const bool done = is_done(ticket_);
    if (done) {
      host_knows();
    }
    return done;
  }

  void synchronize() const override {
    try {
      if (ticket_ != nullptr) {
        ticket_->synchronize();
      }
    } catch (...) {
      host_knows();
      throw;
    }
    host_knows();
  }

  [[nodiscard]] const Ticket& ticket() const { return ticket_; }
  [[nodiscard]] const HappensBefore::Clock& clock() const { return clock_; }

 private:
  void host_knows() const noexcept {
    if (!known_) {
      order().join(HappensBefore::kHost, clock_);
      known_ = true;  // only now: another thread that finds it set goes on at once
    }
  }

  const Ticket ticket_;
  const HappensBefore::Clock clock_;
  mutable std::atomic<bool> known_{false};
};

const CheckedTicket* as_checked(const Ticket& ticket) { return dynamic_cast<const CheckedTicket*>(ticket.get()); }

const Ticket& inner(const Ticket& ticket) {
  const CheckedTicket* const checked = as_checked(ticket);
  return checked == nullptr ? ticket : checked->ticket();
}

class CheckedTier final : public Tier {
 public:
  explicit CheckedTier(std::shared_ptr<Tier> tier)
      : tier_(std::move(tier)), blocks_(next_space_++), name_(" of tier " + std::to_string(blocks_)) {
    if (on_gpu()) {
      watch_cuda_allocator();
    }
  }

  ~CheckedTier() override {
    if (made_in_.forked()) {
      return;
    }
    const MutexLock lock(mutex_);
    for (const auto& [stream, actor] : actors_) {
      order().end(actor);
    }
  }
  CheckedTier(const CheckedTier&) = delete;
  CheckedTier& operator=(const CheckedTier&) = delete;

  [[nodiscard]] c10::Device device() const override { return tier_->device(); }
  [[nodiscard]] c10::Stream current_stream() const override { return tier_->current_stream(); }

  [[nodiscard]] Ticket record(c10::Stream stream) override {
    Ticket ticket = tier_->record(stream);
    if (ticket == nullptr) {  // the calling thread is the compute stream
      return nullptr;
    }
    return std::make_shared<CheckedTicket>(std::move(ticket), order().point(actor(stream)));
  }

  [[nodiscard]] std::optional<Block> try_acquire(std::size_t bytes) override { return tier_->try_acquire(bytes); }

  [[nodiscard]] bool blocks_are_memory() const override { return tier_->blocks_are_memory(); }

  Ticket copy_out(const Block& to, const void* from, const After& after) override {
    Ticket ticket = tier_->copy_out(to, from, plain(after));
    return std::make_shared<CheckedTicket>(
        std::move(ticket), order().copy("copy out" + name_, clocks(after), device_range(from, to.size()), range(to)));
  }

  Ticket copy_in(void* to, const Block& from, const After& after) override {
    Ticket ticket = tier_->copy_in(to, from, plain(after));
    return std::make_shared<CheckedTicket>(
        std::move(ticket), order().copy("copy in" + name_, clocks(after), range(from), device_range(to, from.size())));
  }

  [[nodiscard]] PoolStats pool_stats() const override { return tier_->pool_stats(); }
  [[nodiscard]] StallStats stall_stats() const override { return tier_->stall_stats(); }
  [[nodiscard]] Ticket time_point(c10::Stream stream) override { return tier_->time_point(stream); }
  [[nodiscard]] double ms_between(const Ticket& earlier, const Ticket& later) const override {
    return tier_->ms_between(earlier, later);
  }
  [[nodiscard]] bool captures() const override { return tier_->captures(); }
  void update_trace() override { tier_->update_trace(); }
  void flush() noexcept override { tier_->flush(); }

  void made(c10::Stream stream, const void* data, std::size_t bytes) override {
    if (on_gpu()) {
      forget_former_memory(data, bytes);
    }
    order().access(actor(stream), HappensBefore::Kind::kMade, device_range(data, bytes));
  }

  void used(c10::Stream stream, const void* data, std::size_t bytes) override {
    order().access(actor(stream), HappensBefore::Kind::kRead, device_range(data, bytes));
  }

 protected:
  // Memory goes back to the pool that it came from.
  [[nodiscard]] c10::DataPtr take_memory(std::size_t bytes, c10::Stream stream) override {
    c10::DataPtr data = tier_->allocate(bytes, stream);
    if (on_gpu()) {
      forget_former_memory(data.get(), bytes);
      return data;
    }
    struct Memory {
      HappensBefore::Actor actor;
      std::size_t bytes;
      c10::DataPtr data;
    };
    void* const address = data.get();
    const c10::Device device = data.device();
    auto* const memory = new Memory{actor(stream), bytes, std::move(data)};
    const auto free = [](void* context) {
      const std::unique_ptr<Memory> freed(static_cast<Memory*>(context));
      order().access(freed->actor, HappensBefore::Kind::kFree, device_range(freed->data.get(), freed->bytes));
    };
    return {address, memory, free, device};
  }

  void make_wait(c10::Stream stream, const Ticket& ticket) override {
    tier_->wait(WaitPoint::kCaller, stream, inner(ticket));
    if (const CheckedTicket* const checked = as_checked(ticket)) {
      order().join(actor(stream), checked->clock());
    }
  }

 private:
  [[nodiscard]] bool on_gpu() const { return tier_->device().is_cuda(); }

  // The host, where the calling thread is the compute stream.
  HappensBefore::Actor actor(c10::Stream stream) {
    if (on_gpu()) {
      return actor_of(c10::cuda::CUDAStream(stream));
    }
    const MutexLock lock(mutex_);
    const auto known = actors_.find(stream.id());
    if (known != actors_.end()) {
      return known->second;
    }
    const bool on_host = tier_->record(stream) == nullptr;
    const HappensBefore::Actor made =
        on_host ? HappensBefore::kHost : order().make_actor("stream " + std::to_string(stream.id()) + name_);
    actors_.emplace(stream.id(), made);
    return made;
  }

  static After plain(const After& after) {
    After plain;
    for (const Ticket& ticket : after.tickets()) {
      plain.add(WaitPoint::kCaller, inner(ticket));
    }
    for (const c10::Stream stream : after.streams()) {
      plain.add(WaitPoint::kCaller, stream);
    }
    return plain;
  }

  std::vector<HappensBefore::Clock> clocks(const After& after) {
    std::vector<HappensBefore::Clock> clocks;
    for (const c10::Stream stream : after.streams()) {
      if (const HappensBefore::Actor compute = actor(stream); compute != HappensBefore::kHost) {
        clocks.push_back(order().point(compute));
      }
    }
    for (const Ticket& ticket : after.tickets()) {
      if (const CheckedTicket* const checked = as_checked(ticket)) {
        clocks.push_back(checked->clock());
      }
    }
    return clocks;
  }

  [[nodiscard]] HappensBefore::Range range(const Block& block) const {
    return {blocks_, block.address(), block.size()};
  }

  static inline std::atomic<HappensBefore::Space> next_space_{HappensBefore::kDevice + 1};

  const std::shared_ptr<Tier> tier_;
  const HappensBefore::Space blocks_;
  const std::string name_;
  const ProcessMark made_in_;
  Mutex mutex_;
  std::map<c10::StreamId, HappensBefore::Actor> actors_ EBB_GUARDED_BY(mutex_);
};

}  // namespace

std::shared_ptr<Tier> checked(std::shared_ptr<Tier> tier) { return std::make_shared<CheckedTier>(std::move(tier)); }

std::shared_ptr<Tier> decorated(std::shared_ptr<Tier> tier) { return checked(std::move(tier)); }

void observe_freed(const void* data, std::size_t bytes) noexcept {
  order().access(HappensBefore::kHost, HappensBefore::Kind::kFree, device_range(data, bytes));
}

void observe_gone(const void* data, std::size_t bytes) noexcept { order().forget(device_range(data, bytes)); }

}  // namespace ebb

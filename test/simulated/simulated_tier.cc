#include "test/simulated/simulated_tier.h"

#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <utility>
#include <vector>

#include <c10/util/Exception.h>

#include "streams/base/fault_point.h"
#include "test/simulated/simulated_stream_guard.h"

namespace ebb {

namespace {

// Ordinary host memory for a pool, in which bytes that nobody uses any more are poisoned with 0xFF at once.
//
// Threads: as Backing.
class SimulatedBacking final : public Backing {
 public:
  std::optional<std::uint64_t> grow(std::size_t bytes) override {
    void* const memory =
        fails(FaultPoint::kPinnedAllocation) ? nullptr : std::aligned_alloc(BlockPool::kAlignment, bytes);
    if (memory == nullptr) {
      return std::nullopt;
    }
    slabs_.emplace_back(memory);
    return reinterpret_cast<std::uint64_t>(memory);
  }

  void discard(std::uint64_t address, std::size_t bytes) noexcept override {
    std::memset(reinterpret_cast<void*>(address), 0xFF, bytes);
  }

 private:
  struct Free {
    void operator()(void* memory) const noexcept { std::free(memory); }
  };

  std::vector<std::unique_ptr<void, Free>> slabs_;
};

// The context of a DataPtr of the tier.
struct Allocation {
  std::shared_ptr<SimulatedMemory> memory;
  std::weak_ptr<SimulatedQueues> queues;  // where a kernel poisons the memory; empty if compute is immediate
  void* address;
  c10::StreamId stream;
};

SimulatedQueueId compute_queue(c10::StreamId stream) { return {SimulatedQueueId::Kind::kCompute, stream}; }

void give_back(void* context) {
  const std::unique_ptr<Allocation> allocation(static_cast<Allocation*>(context));
  void* const address = allocation->address;
  if (const std::shared_ptr<SimulatedQueues> queues = allocation->queues.lock()) {
    queues->push(compute_queue(allocation->stream),
                 [memory = allocation->memory, address] { SimulatedMemory::poison(address); }, {});
  } else {
    SimulatedMemory::poison(address);
  }
  allocation->memory->give(address);
}

}  // namespace

SimulatedTier::SimulatedTier(Schedule schedule, std::uint64_t seed, std::optional<std::uint64_t> capacity_bytes,
                             bool deferred_compute)
    : deferred_compute_(deferred_compute),
      memory_(std::make_shared<SimulatedMemory>()),
      pool_(std::make_shared<BlockPool>(std::make_unique<SimulatedBacking>(), capacity_bytes)),
      queues_(std::make_shared<SimulatedQueues>(schedule, seed)) {}

c10::Stream SimulatedTier::current_stream() const {
  return c10::Stream(c10::Stream::UNSAFE, device(), SimulatedStreamGuard::current());
}

Ticket SimulatedTier::record(c10::Stream stream) {
  if (!deferred_compute_) {
    return nullptr;
  }
  return queues_->push(compute_queue(stream.id()), nullptr, {});
}

void SimulatedTier::make_wait(c10::Stream stream, const Ticket& ticket) {
  if (ticket == nullptr) {
    return;
  }
  if (deferred_compute_) {
    queues_->push(compute_queue(stream.id()), nullptr, {ticket});
    return;
  }
  if (!ticket->done()) {
    const MutexLock lock(mutex_);
    ++forced_waits_;
  }
  ticket->synchronize();
}

c10::DataPtr SimulatedTier::take_memory(std::size_t bytes, c10::Stream of) {
  if (bytes == 0) {
    return {nullptr, device()};
  }
  TORCH_CHECK_WITH(OutOfMemoryError, !fails(FaultPoint::kDeviceAllocation), "SimulatedTier::allocate of ", bytes,
                   " bytes: out of memory");
  const c10::StreamId stream = of.id();
  void* const address = memory_->take(bytes, stream);
  std::weak_ptr<SimulatedQueues> queues;
  if (deferred_compute_) {
    queues = queues_;
  } else {
    SimulatedMemory::poison(address);
  }
  auto* const allocation = new Allocation{memory_, std::move(queues), address, stream};
  return {address, allocation, &give_back, device()};
}

std::optional<Block> SimulatedTier::try_acquire(std::size_t bytes) {
  std::optional<Block> block = pool_->try_acquire(bytes);
  if (block && block->gates().empty()) {
    std::memset(block->data(), 0xFF, bytes);
  }
  return block;
}

Ticket SimulatedTier::copy_out(const Block& to, const void* from, const After& after) {
  return copy(SimulatedQueueId::Kind::kOutLane, to.data(), from, to.size(), after);
}

Ticket SimulatedTier::copy_in(void* to, const Block& from, const After& after) {
  return copy(SimulatedQueueId::Kind::kInLane, to, from.data(), from.size(), after);
}

StallStats SimulatedTier::stall_stats() const {
  const MutexLock lock(mutex_);
  const std::uint64_t forced = forced_waits_ + queues_->forced_points();
  return {.count = forced, .total_ms = static_cast<double>(forced)};
}

Ticket SimulatedTier::compute(c10::Stream stream, std::function<void()> kernel) {
  Ticket ticket = queues_->push(compute_queue(stream.id()), std::move(kernel), {});
  if (!deferred_compute_) {
    ticket->synchronize();
  }
  return ticket;
}

void SimulatedTier::fail_copy(std::uint64_t nth) {
  const MutexLock lock(mutex_);
  copies_until_failure_ = nth;
}

Ticket SimulatedTier::copy(SimulatedQueueId::Kind lane, void* to, const void* from, std::size_t bytes,
                           const After& after) {
  const char* const name = lane == SimulatedQueueId::Kind::kOutLane ? "copy_out" : "copy_in";
  TORCH_CHECK(to != nullptr, "SimulatedTier::", name, " of ", bytes, " bytes: the destination is null");
  TORCH_CHECK(from != nullptr, "SimulatedTier::", name, " of ", bytes, " bytes: the source is null");
  TORCH_CHECK(!fails(FaultPoint::kCopy), "SimulatedTier::", name, " of ", bytes, " bytes: cannot be queued");
  std::vector<Ticket> tickets(after.tickets().begin(), after.tickets().end());
  for (const c10::Stream stream : after.streams()) {
    if (Ticket point = record(stream)) {
      tickets.push_back(std::move(point));
    }
  }
  std::function<void()> work = [=] {
    for (const Ticket& ticket : tickets) {
      if (lane == SimulatedQueueId::Kind::kInLane) {
        ticket->synchronize();  // done by now; throws if it failed
      }
    }
    std::memcpy(to, from, bytes);
  };
  if (next_copy_fails()) {
    work = [] { throw std::runtime_error("simulated copy failure"); };
  }
  return queues_->push({lane}, std::move(work), std::move(tickets));
}

bool SimulatedTier::next_copy_fails() {
  const MutexLock lock(mutex_);
  return copies_until_failure_ > 0 && --copies_until_failure_ == 0;
}

}  // namespace ebb

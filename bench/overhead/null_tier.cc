#include "bench/overhead/null_tier.h"

#include <utility>

#include <c10/core/CPUAllocator.h>

namespace ebb {
namespace {

class Addresses final : public Backing {
 public:
  std::optional<std::uint64_t> grow(std::size_t bytes) override { return std::exchange(next_, next_ + bytes); }

 private:
  std::uint64_t next_ = BlockPool::kAlignment;
};

// As a copy's ticket would be: made for it, shared, and done.
class Done final : public Completion {
 public:
  [[nodiscard]] bool done() const noexcept override { return true; }
  void synchronize() const override {}
};

}  // namespace

NullTier::NullTier() : pool_(std::make_shared<BlockPool>(std::make_unique<Addresses>(), std::nullopt)) {}

c10::Stream NullTier::current_stream() const { return c10::Stream(c10::Stream::DEFAULT, device()); }

Ticket NullTier::record(c10::Stream /*stream*/) { return nullptr; }

c10::DataPtr NullTier::take_memory(std::size_t bytes, c10::Stream /*stream*/) {
  return c10::GetCPUAllocator()->allocate(bytes);
}

Ticket NullTier::copy_out(const Block& /*to*/, const void* /*from*/, const After& /*after*/) {
  return std::make_shared<const Done>();
}

Ticket NullTier::copy_in(void* /*to*/, const Block& /*from*/, const After& /*after*/) {
  return std::make_shared<const Done>();
}

void NullTier::make_wait(c10::Stream /*stream*/, const Ticket& /*ticket*/) {}

}  // namespace ebb

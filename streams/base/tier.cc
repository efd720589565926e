#include "streams/base/tier.h"

#include <atomic>
#include <chrono>
#include <utility>

namespace ebb {
namespace {

class HostTime final : public Completion {
 public:
  [[nodiscard]] bool done() const noexcept override { return true; }
  void synchronize() const override {}

  const std::chrono::steady_clock::time_point time = std::chrono::steady_clock::now();
};

constinit std::atomic<TierDecorator> decorator_of_all{nullptr};

}  // namespace

void decorate_tiers(TierDecorator decorator) noexcept { decorator_of_all = decorator; }

std::shared_ptr<Tier> decorated(std::shared_ptr<Tier> tier) {
  const TierDecorator decorator = decorator_of_all;
  return decorator == nullptr ? tier : decorator(std::move(tier));
}

Ticket Tier::time_point(c10::Stream /*stream*/) { return std::make_shared<HostTime>(); }

double Tier::ms_between(const Ticket& earlier, const Ticket& later) const {
  const auto time = [](const Ticket& ticket) { return dynamic_cast<const HostTime&>(*ticket).time; };
  return std::chrono::duration<double, std::milli>(time(later) - time(earlier)).count();
}

void Tier::wait_or_block(WaitPoint why, c10::Stream stream, const Ticket& ticket) noexcept {
  try {
    wait(why, stream, ticket);
    return;
  } catch (...) {
    // Here the work before the ticket has failed, and is over, or the wait could not be queued.
  }
  try {
    if (ticket != nullptr) {
      ticket->synchronize();
    }
  } catch (...) {
  }
}

}  // namespace ebb

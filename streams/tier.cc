#include "streams/tier.h"

#include <chrono>

namespace ebb {
namespace {

class HostTime final : public Completion {
 public:
  [[nodiscard]] bool done() const noexcept override { return true; }
  void synchronize() const override {}

  const std::chrono::steady_clock::time_point time = std::chrono::steady_clock::now();
};

}  // namespace

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
    // The ticket's own failure, after which nobody waits any more, or the wait could not be queued.
  }
  try {
    if (ticket != nullptr) {
      ticket->synchronize();
    }
  } catch (...) {
  }
}

}  // namespace ebb

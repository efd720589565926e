#include "streams/base/tier.h"

#include <chrono>

#include "streams/base/fault_point.h"

namespace ebb {
namespace {

class HostTime final : public Completion {
 public:
  [[nodiscard]] bool done() const noexcept override { return true; }
  void synchronize() const override {}

  const std::chrono::steady_clock::time_point time = std::chrono::steady_clock::now();
};

}  // namespace

#ifdef EBB_TESTS  // for programs without test/checked, whose definitions win
__attribute__((weak)) bool in_force(WaitPoint /*point*/) noexcept { return true; }
__attribute__((weak)) bool fails(FaultPoint /*point*/) noexcept { return false; }
__attribute__((weak)) std::shared_ptr<Tier> decorated(std::shared_ptr<Tier> tier) { return tier; }
#endif

Ticket Tier::time_point(c10::Stream /*stream*/) { return std::make_shared<HostTime>(); }

double Tier::ms_between(const Ticket& earlier, const Ticket& later) const {
  const auto time = [](const Ticket& ticket) { return dynamic_cast<const HostTime&>(*ticket).time; };
  return std::chrono::duration<double, std::milli>(time(later) - time(earlier)).count();
}

void Tier::wait_or_block(WaitPoint why, c10::Stream stream, const Ticket& ticket) noexcept {
  try {
    wait(why, stream, ticket);
  } catch (...) {  // the work before the ticket has failed, and is over, or the wait could not be queued
    try {
      if (ticket != nullptr) {
        ticket->synchronize();
      }
    } catch (...) {
    }
  }
}

}  // namespace ebb

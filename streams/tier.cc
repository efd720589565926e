#include "streams/tier.h"

namespace ebb {

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

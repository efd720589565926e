#pragma once

#include <span>
#include <utility>

#include <c10/core/Stream.h>
#include <c10/util/SmallVector.h>

#include "streams/base/ticket.h"
#include "streams/base/wait_point.h"

namespace ebb {

// The list that a copy starts after: tickets, and streams, which stand for all the work that they have been given by
// the time of the call. Each entry has the name of its reason. The list is built where the copy is asked for, so that
// reason and ticket stand side by side. A stream is listed, and not a point on it, so that a tier may take a later
// point for several copies at once.
//
// Threads: one owner at a time.
class After {
 public:
  After() = default;
  After(WaitPoint why, Ticket ticket) { add(why, std::move(ticket)); }
  After(WaitPoint why, std::span<const Ticket> tickets) { add(why, tickets); }
  After(WaitPoint why, c10::Stream stream) { add(why, stream); }

  // An empty ticket is a point that has been reached, and adds nothing.
  void add(WaitPoint why, Ticket ticket) {
    if (ticket != nullptr && in_force(why)) {
      tickets_.push_back(std::move(ticket));
    }
  }

  void add(WaitPoint why, std::span<const Ticket> tickets) {
    for (const Ticket& ticket : tickets) {
      add(why, ticket);
    }
  }

  // `stream`: a stream of the tier's device.
  void add(WaitPoint why, c10::Stream stream) {
    if (in_force(why)) {
      streams_.push_back(stream);
    }
  }

  [[nodiscard]] std::span<const c10::Stream> streams() const { return {streams_.data(), streams_.size()}; }
  [[nodiscard]] std::span<const Ticket> tickets() const { return {tickets_.data(), tickets_.size()}; }

 private:
  c10::SmallVector<Ticket, 4> tickets_;  // no allocation for the usual few
  c10::SmallVector<c10::Stream, 1> streams_;
};

}  // namespace ebb

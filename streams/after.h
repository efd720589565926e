#pragma once

#include <span>
#include <utility>

#include <c10/util/SmallVector.h>

#include "streams/ticket.h"
#include "streams/wait_point.h"

namespace ebb {

// What a copy starts after: tickets, each with the name of the rule that it serves. Built where the copy is asked for,
// so that a rule and its ticket stand side by side.
//
// Threads: one owner at a time.
class After {
 public:
  After() = default;
  After(WaitPoint why, Ticket ticket) { add(why, std::move(ticket)); }
  After(WaitPoint why, std::span<const Ticket> tickets) { add(why, tickets); }

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

  [[nodiscard]] std::span<const Ticket> tickets() const { return {tickets_.data(), tickets_.size()}; }

 private:
  c10::SmallVector<Ticket, 4> tickets_;  // no allocation for the usual few
};

}  // namespace ebb

#pragma once

#include <memory>

namespace ebb {

// A point in the work of a stream or an I/O queue, which is done when that work is. A point is fixed when it is made
// and never moves (re-recording an event would hide the earlier point).
//
// Threads: every member may be called from any thread.
class Completion {
 public:
  virtual ~Completion() = default;

  // True once all the work before the point has finished, with or without an error. Never blocks.
  [[nodiscard]] virtual bool done() const noexcept = 0;

  // Blocks the calling thread until done. Throws the error of work that failed, at every call.
  // Memory ordering: what the work wrote to host memory is visible after the return.
  virtual void synchronize() const = 0;
};

// Shared by everybody who has to wait. An empty ticket is a point that has always been reached.
using Ticket = std::shared_ptr<const Completion>;

inline bool is_done(const Ticket& ticket) noexcept { return ticket == nullptr || ticket->done(); }

}  // namespace ebb

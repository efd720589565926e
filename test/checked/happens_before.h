#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "streams/base/mutex.h"

namespace ebb {

// Finds missing waits: knows which operation is ordered behind which, and reports two accesses to the same bytes, one
// of them a write, that nothing orders. Where this is linked, as in tests, every offloader's tier reports
// each copy, ticket, wait, use and free (test/checked/checked_tier.h).
//
// Note [What is ordered]
// Vector clocks (Lamport 1978; Mattern 1989) over streams and copies. Three kinds of actor:
//   - a stream: its operations follow one another;
//   - a copy: an actor of its own, since lanes imply no order (streams/base/tier.h);
//   - the host: all host threads together. Their order among themselves is the affair of locks, which ThreadSanitizer
//     checks. What the host has done, and what it knows to be done because it asked a ticket, comes before everything
//     that the host queues from then on. So accesses by the host are checked, but never have to be remembered.
// Freeing memory counts as a write by the stream whose pool it goes back to.
//
// Errors: a violation names both accesses and the order that nothing enforces. Without a handler the violation is
// printed and the process aborts: nothing that happens after a race is worth looking at. Where the environment variable
// EBB_ORDER_UNCHECKED is set, the process's instance ignores violations: `./dev test waits --gpu` looks for wrong
// bytes alone.
//
// Threads: every member may be called from any thread.
class HappensBefore {
 public:
  // Addresses in device memory, or in the blocks of one tier.
  using Space = std::uint64_t;
  static constexpr Space kDevice = 0;

  struct Range {
    Space space;
    std::uint64_t begin;
    std::uint64_t bytes;
  };

  // A stream of a tier, or a copy; 0 is the host.
  using Actor = std::uint64_t;
  static constexpr Actor kHost = 0;

  // The work that is known to have happened: for each actor, up to which of its points.
  using Clock = std::map<Actor, std::uint64_t>;

  // kMade: written by the program, some time before now. Later accesses must come behind this write. Earlier accesses
  // need not come before it, because autograd allows a write to a tensor whose copy out is under way, and refuses the
  // save instead. A program orders its streams in ways that are not reported here, so kMade forgets earlier writes and
  // frees, and copies that some stream has waited for; a copy that no stream has waited for is checked against later
  // accesses.
  enum class Kind : std::uint8_t { kRead, kMade, kWrite, kFree };

  using Handler = void (*)(const std::string& violation);

  // The instance of the process. Never destroyed. A forked child has one of its own, which knows of no earlier access.
  static HappensBefore& instance();

  // Returns the former handler; null stands for the default, which prints and aborts.
  Handler set_handler(Handler handler);

  // A new actor, called by `name` in reports.
  Actor make_actor(std::string name);

  // A stream's tier has ended, and all its work is done: later accesses come behind it, and what the stream still
  // frees, the host frees. Without this every clock would grow with each tier that the process has had.
  void end(Actor stream);

  // The actor's operations so far: the clock that a ticket recorded there stands for.
  Clock point(Actor stream);

  // Everything that `actor`, a stream or the host, does from now on comes behind `clock`.
  void join(Actor actor, const Clock& clock);

  // A copy behind everything in `after`; `reads` and `writes` are its accesses. Returns the clock that its ticket
  // stands for.
  Clock copy(const std::string& name, const std::vector<Clock>& after, Range reads, Range writes);

  // An access by a stream, or by the host, at its present point. kAllStreams: a free that came when all streams that
  // had used the memory were done, whichever streams they were.
  enum class Behind : bool { kItself, kAllStreams };
  void access(Actor actor, Kind kind, Range range, Behind behind = Behind::kItself);

  // These bytes go back to the system: later memory at their addresses is other memory.
  void forget(Range range);

 private:
  struct Access {
    Actor actor;
    std::uint64_t at;
    Kind kind;
  };
  // The accesses to one segment of a space that a later one may have to be ordered behind.
  struct Segment {
    std::uint64_t end;
    std::vector<Access> last;  // at most one write or free, and the reads after it
  };
  using Segments = std::map<std::uint64_t, Segment>;  // by first byte; disjoint

  void access_locked(const Access& access, const Clock& knows, Range range, std::vector<std::string>& violations)
      EBB_REQUIRES(mutex_);
  [[nodiscard]] bool ordered(const Access& earlier, const Clock& knows) const EBB_REQUIRES(mutex_);
  static void split(Segments& segments, std::uint64_t at);
  [[nodiscard]] std::string describe(const Access& access) const EBB_REQUIRES(mutex_);
  static void report(const std::vector<std::string>& violations, Handler handler);

  Mutex mutex_;
  Handler handler_ EBB_GUARDED_BY(mutex_) = nullptr;
  // Names of streams, and of copies that the host does not know to be done.
  std::map<Actor, std::string> names_ EBB_GUARDED_BY(mutex_);
  std::map<Actor, Clock> streams_ EBB_GUARDED_BY(mutex_);  // what each stream is behind
  Clock host_ EBB_GUARDED_BY(mutex_);                      // streams only: copies that the host knows of are forgotten
  std::map<Space, Segments> segments_ EBB_GUARDED_BY(mutex_);
  Actor next_actor_ EBB_GUARDED_BY(mutex_) = 1;
};

}  // namespace ebb

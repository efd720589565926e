#pragma once

#include <cstdint>

namespace ebb {

// Every wait, gate and hold that keeps the library's bytes in order, by name. A copy's list (After), a stream's wait
// (Tier::wait) and a block's gate (Block::gate) each take the name of their reason, so a wait without an entry here
// does not compile. docs/design.md says which rule each name serves.
//
// Note [Waits that can be taken away]
// `./dev test waits` leaves out each wait in turn and expects a test to fail. Only a build for tests (EBB_TESTS) can
// leave a wait out (test/checked/wait_plan.cc).
enum class WaitPoint : std::uint8_t {
  kCaller,  // a wait of somebody outside the library; always in force

  kOutAfterCompute,     // a copy out, behind the work that makes its bytes
  kOutAfterBlockUsers,  // a copy out, behind the copies of the block's earlier owners
  kOutGatesBlock,       // a block's next owner, behind the copy out
  kSourceInStash,       // a source's memory, held while its copy out is under way
  kStashSweep,          // a source is let go only if its copy out is done
  kStashBound,          // the stream, behind a source's copy out before it is let go to make room
  kStashEnd,            // the streams, behind all copies out of a stash that ends

  kInAfterOut,         // a copy in, behind the copy out of the same bytes
  kInAfterMemory,      // a copy in, behind the earlier users of the memory that it writes
  kInGatesBlock,       // a block's next owner, behind the copy in
  kUseAfterIn,         // the stream that asks for the bytes, behind the copy in
  kUnusedAfterIn,      // the stream that owns the memory, behind a copy in that nobody has asked for
  kOwnStream,          // a copy in is handed to no stream but the stream whose memory it is in
  kPendingUses,        // a copy in is kept until each save of its storage has got the bytes
  kWriteAfterOut,      // a stream that writes to a source, behind the copy out of what was there
  kBackAfterOut,       // a stream that owns or uses a managed storage's memory, behind a copy out that is under way
  kFreeAfterUsers,     // the stream that owns a managed storage's memory, behind the uses of other streams
  kAtHomeAfterUsers,   // the calling thread, which is to use bytes at home, behind all copies of their block
  kUseAfterPostponed,  // a stream that uses a managed storage, behind work that was put off until that use

  kPoolGates,     // bytes that return to a pool, with the tickets of their users
  kPoolEnd,       // a pool's memory, behind all its users
  kDiskGates,     // a disk request, behind the tickets in its list
  kDiskLastPart,  // a disk request's ticket, behind its last part
  kHostWait,      // the calling thread, where it is the compute stream, behind a ticket

  kLaneGates,   // GPU: a lane, behind the tickets in a copy's list
  kStreamWait,  // GPU: a compute stream, behind a ticket
  kSlabEnd,     // GPU: host memory is unmapped, behind all work of the device
};

// Whether the wait is to be made.
#ifdef EBB_TESTS
[[nodiscard]] bool in_force(WaitPoint point) noexcept;
#else
[[nodiscard]] constexpr bool in_force(WaitPoint /*point*/) noexcept { return true; }
#endif

}  // namespace ebb

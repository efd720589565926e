#pragma once

#include <utility>
#include <vector>

#include <c10/core/Stream.h>

#include "streams/base/block_pool.h"
#include "streams/base/ticket.h"
#include "streams/base/tier.h"

namespace ebb {

// The home of one storage's bytes: a block of a tier, and the last copies to and from this block. All copies of an
// offloader's start here, so that what a lane waits for (R1, R2, R3, R5, R7 in docs/design.md) stands in one file.
//
// Threads: one owner at a time.
class HomeBlock {
 public:
  // `tier`: the block's, which must outlive this object.
  HomeBlock(Tier& tier, Block block) : tier_(&tier), block_(std::move(block)) {}

  // Starts the copy of all bytes from the device, behind what `stream` has been given so far, and behind everybody who
  // still uses the block. `from` must stay valid until the copy, copied_out() from now on, is done. Throws, and has
  // started nothing, where the copy cannot be queued.
  void copy_out(const void* from, c10::Stream stream);

  // Starts the copy of all bytes to the device: `to`, memory from the pool of `stream`, behind what `stream` has been
  // given so far, and behind the last copy out. `to` must stay valid until the copy, copied_in() from now on, is done.
  // Throws, and has started nothing, where the copy cannot be queued.
  void copy_in(void* to, c10::Stream stream);

  // The last copies; null before the first, and after forget_copy_out().
  [[nodiscard]] const Ticket& copied_out() const { return out_; }
  [[nodiscard]] const Ticket& copied_in() const { return in_; }

  // Of a copy out that has failed: nobody is to wait for it any more.
  void forget_copy_out() { out_ = nullptr; }

  // The copies, the last owner's among them, that may not be over.
  [[nodiscard]] const std::vector<Ticket>& users() const { return block_.gates(); }

  // The bytes, where Tier::blocks_are_memory().
  [[nodiscard]] void* data() const { return block_.data(); }

 private:
  Tier* tier_;
  Block block_;
  Ticket out_;
  Ticket in_;
};

}  // namespace ebb

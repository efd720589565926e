#pragma once

#include <array>
#include <cstddef>
#include <string_view>

#include "streams/base/wait_point.h"

namespace ebb {

struct WaitPointName {
  WaitPoint point;
  std::string_view name;
  bool gpu_only;  // only a GPU's tier has this wait
};

// The waits that can be left out.
inline constexpr std::array kWaitPoints{
    WaitPointName{WaitPoint::kOutAfterCompute, "out_after_compute", false},
    WaitPointName{WaitPoint::kOutAfterBlockUsers, "out_after_block_users", false},
    WaitPointName{WaitPoint::kOutGatesBlock, "out_gates_block", false},
    WaitPointName{WaitPoint::kSourceInStash, "source_in_stash", false},
    WaitPointName{WaitPoint::kStashSweep, "stash_sweep", false},
    WaitPointName{WaitPoint::kStashBound, "stash_bound", false},
    WaitPointName{WaitPoint::kStashEnd, "stash_end", false},
    WaitPointName{WaitPoint::kInAfterOut, "in_after_out", false},
    WaitPointName{WaitPoint::kInAfterMemory, "in_after_memory", false},
    WaitPointName{WaitPoint::kInGatesBlock, "in_gates_block", false},
    WaitPointName{WaitPoint::kUseAfterIn, "use_after_in", false},
    WaitPointName{WaitPoint::kUnusedAfterIn, "unused_after_in", false},
    WaitPointName{WaitPoint::kOwnStream, "own_stream", false},
    WaitPointName{WaitPoint::kPendingUses, "pending_uses", false},
    WaitPointName{WaitPoint::kWriteAfterOut, "write_after_out", false},
    WaitPointName{WaitPoint::kBackAfterOut, "back_after_out", false},
    WaitPointName{WaitPoint::kFreeAfterUsers, "free_after_users", false},
    WaitPointName{WaitPoint::kAtHomeAfterUsers, "at_home_after_users", false},
    WaitPointName{WaitPoint::kUseAfterPostponed, "use_after_postponed", false},
    WaitPointName{WaitPoint::kPoolGates, "pool_gates", false},
    WaitPointName{WaitPoint::kPoolEnd, "pool_end", false},
    WaitPointName{WaitPoint::kDiskGates, "disk_gates", false},
    WaitPointName{WaitPoint::kDiskLastPart, "disk_last_part", false},
    WaitPointName{WaitPoint::kHostWait, "host_wait", false},
    WaitPointName{WaitPoint::kLaneGates, "lane_gates", true},
    WaitPointName{WaitPoint::kStreamWait, "stream_wait", true},
    WaitPointName{WaitPoint::kSlabEnd, "slab_end", true},
};
static_assert(kWaitPoints.size() == static_cast<std::size_t>(WaitPoint::kSlabEnd),
              "each but kCaller has an entry, and kSlabEnd is the last");

}  // namespace ebb

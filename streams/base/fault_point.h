#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace ebb {

// The calls of the library that the system may refuse. Each place asks fails() before such a call, and acts on
// true as on the system's own refusal, without the call. So tests can have every call fail
// (streams/checked/fault_plan.h).
enum class FaultPoint : std::uint8_t {
  kPinnedAllocation,  // host memory for blocks: mapping it, and registering it with CUDA
  kDeviceAllocation,  // memory to copy back to
  kEventCreation,     // a point on a CUDA stream, with a new event or a reused event
  kCopy,              // queueing a copy
  kOpen,              // the spill folder, and the file in it
  kFallocate,         // extending the spill file
  kPread,             // with io_uring: a read that fails
  kPwrite,            // with io_uring: a write that fails
  kUringSubmission,
  kUringWait,
  kThreadStart,
};

inline constexpr std::size_t kFaultPoints = static_cast<std::size_t>(FaultPoint::kThreadStart) + 1;

// Decides which calls fail. Only FaultPlan, which tests link, sets this; null: nothing fails.
using FaultDecider = bool (*)(FaultPoint) noexcept;
inline constinit std::atomic<FaultDecider> fault_decider{nullptr};

// Whether this call is to fail.
[[nodiscard]] inline bool fails(FaultPoint point) noexcept {
  const FaultDecider decider = fault_decider.load(std::memory_order_relaxed);
  return decider != nullptr && decider(point);
}

}  // namespace ebb

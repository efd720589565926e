#pragma once

#include <cstddef>
#include <cstdint>

namespace ebb {

// The calls of the library that the system may refuse. Each place asks fails() before such a call, and acts on
// true as on the system's own refusal, without the call; after a read or write of the spill file, and acts as if the
// call had failed. So tests can have every call fail (test/checked/fault_plan.h).
enum class FaultPoint : std::uint8_t {
  kPinnedAllocation,  // host memory for blocks: mapping it, and registering it with CUDA
  kDeviceAllocation,  // memory to copy back to
  kEventCreation,     // a point on a CUDA stream, with a new event or a reused event
  kCopy,              // queueing a copy
  kOpen,              // the spill folder, and the file in it
  kFallocate,         // extending the spill file
  kPread,
  kPwrite,
  kUringSubmission,
  kUringWait,
  kThreadStart,
};

inline constexpr std::size_t kFaultPoints = static_cast<std::size_t>(FaultPoint::kThreadStart) + 1;

// Whether this call is to fail.
#ifdef EBB_TESTS
[[nodiscard]] bool fails(FaultPoint point) noexcept;
#else
[[nodiscard]] constexpr bool fails(FaultPoint /*point*/) noexcept { return false; }
#endif

}  // namespace ebb

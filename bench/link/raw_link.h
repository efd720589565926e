#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include <c10/core/Device.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

#include "bench/common/device_buffer.h"
#include "streams/gpu/cuda_event.h"
#include "streams/gpu/host_slabs.h"

namespace ebb {

// At this time, in milliseconds of some clock, so many bytes had been copied.
struct Progress {
  double ms = 0;
  double bytes = 0;
};

// The progress of one direction's copies: in the order of time, from the start on, when no byte had been copied.
using ProgressCurve = std::vector<Progress>;

// GB/s (1e9 bytes) from the first point to the last. Requires two points of different times.
double rate_gb_per_s(const ProgressCurve& curve);

// GB/s of each of two curves on one clock, over the time in which both ran: from the later start until the curve's own
// last point before either was done, because the other then has the link to itself. A curve without such a point counts
// as having gone evenly to its next. Throws std::runtime_error if they never ran at once.
std::pair<double, double> rates_together(const ProgressCurve& a, const ProgressCurve& b);

enum class Direction : std::uint8_t { kDeviceToHost, kHostToDevice };

struct CopyRate {
  double gb_per_s = 0;         // 1e9 bytes
  double enqueue_us_each = 0;  // the cost of a copy to the host
  bool queued_ahead = false;   // all copies were queued before the first started
};

// The rate of the link between a GPU and host memory: cudaMemcpyAsync back to back on one stream for each direction,
// timed by events on these streams. The host memory is made as the memory of ebb's pool.
//
// Copies of pinned memory are all queued before the first starts, so that the host's pace is not in the rate. Copies
// of pageable memory cannot be queued so: their call blocks until the host's part of the copy is done. For pageable
// memory each direction has a thread.
//
// Threads: one at a time.
class RawLink {
 public:
  static constexpr std::size_t kMostBytes = std::size_t{1} << 30;

  // Takes 2 GiB of the device's memory and of the host's. Throws std::runtime_error where the host has no memory left,
  // c10::Error where the device has none left.
  RawLink(c10::Device device, bool pinned);

  // How many copies of so many bytes a measurement has.
  [[nodiscard]] std::size_t copies(std::size_t bytes) const;

  // A copy's size is at most kMostBytes. Each throws c10::Error for what CUDA refuses.
  CopyRate alone(Direction direction, std::size_t bytes);

  // Both directions at once. The first result is device to host, the second host to device.
  std::pair<CopyRate, CopyRate> together(std::size_t bytes);

 private:
  struct Lane {
    cudaMemcpyKind kind;
    c10::cuda::CUDAStream stream;
    DeviceBuffer device_memory;
    std::byte* host_memory;
  };
  struct Mark {
    std::unique_ptr<const CudaEvent> reached;
    std::size_t bytes;  // that have been copied by this point
  };
  struct Queued {
    std::vector<Mark> marks;
    double enqueue_us_each = 0;
  };

  std::byte* take_host_memory();
  Queued queue(const Lane& lane, std::size_t bytes, const CudaEvent& start, std::size_t marks);
  static ProgressCurve wait(const Queued& queued, const CudaEvent& origin);

  const c10::Device device_;
  const bool pinned_;
  CudaEventPool& events_;
  HostSlabs slabs_;
  const c10::cuda::CUDAStream gate_stream_;
  const Lane out_;
  const Lane in_;
};

}  // namespace ebb

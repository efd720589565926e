#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include <c10/core/Device.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

#include "streams/base/mutex.h"
#include "streams/base/ticket.h"

namespace ebb {

class CudaEvent;

// Events of one device, made once and used again: creating an event costs more than recording it.
//
// Note [Events are never destroyed]
// A ticket may die after the CUDA runtime has (a global Offloader at process exit), where destroying an event is an
// error. So pools live as long as the process, one for each device and kind. A pool holds as many events as were ever
// in flight at once.
//
// Threads: every member may be called from any thread.
class CudaEventPool {
 public:
  enum class Timing : bool { kOff, kOn };

  static CudaEventPool& of(c10::Device device, Timing timing);

  // How many events all pools have made.
  [[nodiscard]] static std::uint64_t made() { return made_; }

  CudaEventPool(const CudaEventPool&) = delete;
  CudaEventPool& operator=(const CudaEventPool&) = delete;

  // The point after all work given to `stream` so far. `stream` must be of this pool's device.
  [[nodiscard]] std::shared_ptr<const CudaEvent> record(c10::cuda::CUDAStream stream);

 private:
  friend class CudaEvent;
  CudaEventPool(c10::Device device, Timing timing) : device_(device), timing_(timing) {}
  cudaEvent_t take();
  void give_back(cudaEvent_t event) noexcept;

  const c10::Device device_;
  const Timing timing_;
  static inline std::atomic<std::uint64_t> made_{0};
  Mutex mutex_;
  std::vector<cudaEvent_t> free_ EBB_GUARDED_BY(mutex_);
};

// A ticket on the GPU: an event that was recorded when the ticket was made, so that no wait can meet an event that was
// never recorded (a silent no-op), and so that nobody can record the event again.
class CudaEvent final : public Completion {
 public:
  CudaEvent(CudaEventPool& pool, c10::cuda::CUDAStream stream);
  ~CudaEvent() override { pool_.give_back(event_); }
  CudaEvent(const CudaEvent&) = delete;
  CudaEvent& operator=(const CudaEvent&) = delete;

  [[nodiscard]] bool done() const noexcept override;
  void synchronize() const override;

  // All later work of `stream`, which may be of any device, waits for this point. The host does not block.
  void block(c10::cuda::CUDAStream stream) const;

  // Milliseconds from `earlier` to this point. Both must be done and from pools with Timing::kOn.
  [[nodiscard]] float ms_since(const CudaEvent& earlier) const;

 private:
  CudaEventPool& pool_;
  const cudaEvent_t event_;
};

}  // namespace ebb

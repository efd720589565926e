#include "bench/stream_gate.h"

#include <chrono>
#include <utility>

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <cuda_runtime_api.h>

namespace ebb {

StreamGate::StreamGate(c10::cuda::CUDAStream stream) : stream_(stream) {
  const c10::cuda::CUDAGuard device(stream_.device());
  C10_CUDA_CHECK(cudaLaunchHostFunc(stream_.stream(), &StreamGate::hold, this));
}

StreamGate::~StreamGate() {
  open();
  static_cast<void>(cudaStreamSynchronize(stream_.stream()));
}

bool StreamGate::open() {
  const std::lock_guard lock(mutex_);
  opened_.notify_all();
  return !std::exchange(open_, true);
}

// On a thread of CUDA's, where no call of CUDA's is allowed.
void StreamGate::hold(void* gate) {
  constexpr std::chrono::milliseconds kLongest{200};  // Note [A gate gives way]
  auto& self = *static_cast<StreamGate*>(gate);
  std::unique_lock lock(self.mutex_);
  self.opened_.wait_for(lock, kLongest, [&] { return self.open_; });
  self.open_ = true;
}

}  // namespace ebb

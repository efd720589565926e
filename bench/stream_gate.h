#pragma once

#include <condition_variable>
#include <mutex>

#include <c10/cuda/CUDAStream.h>

namespace ebb {

// Holds a stream up, and with it every stream that waits for an event which is recorded there behind the gate: so the
// host can queue all copies first, and they start together and run without it.
//
// Note [A gate gives way]
// A stream takes a limited number of operations, and where it is full the host's next call blocks until the stream has
// moved on. Behind a gate that only the host opens, that would be for ever. So a gate opens by itself after 200 ms, and
// says so.
//
// Threads: every member may be called from any thread.
class StreamGate {
 public:
  // Shut. `stream` must be used for nothing else meanwhile. Throws c10::Error.
  explicit StreamGate(c10::cuda::CUDAStream stream);

  // Opens, and waits for the stream.
  ~StreamGate();
  StreamGate(const StreamGate&) = delete;
  StreamGate& operator=(const StreamGate&) = delete;

  // Whether it was shut until now: false after it gave way, and where it was opened before.
  bool open();

 private:
  static void hold(void* gate);

  const c10::cuda::CUDAStream stream_;
  std::mutex mutex_;
  std::condition_variable opened_;
  bool open_ = false;  // LOCK: mutex_
};

}  // namespace ebb

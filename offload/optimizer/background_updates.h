#pragma once

#include <condition_variable>
#include <cstdint>
#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/thread_pool.h>

#include "offload/optimizer/part_update.h"
#include "streams/base/mutex.h"
#include "streams/base/process_mark.h"

namespace ebb {

// A thread that does updates at home before anybody asks for them, one after the other. Updates that have not begun
// when this object ends are done by their parameters' next uses.
//
// Threads: every member may be called from any thread, but the destructor.
class BackgroundUpdates {
 public:
  static constexpr std::uint64_t kMostCopiedBytes = std::uint64_t{2} << 30;

  explicit BackgroundUpdates(std::uint64_t most_copied_bytes = kMostCopiedBytes)
      : most_copied_bytes_(most_copied_bytes) {}
  ~BackgroundUpdates();
  BackgroundUpdates(const BackgroundUpdates&) = delete;
  BackgroundUpdates& operator=(const BackgroundUpdates&) = delete;

  // Puts the update off, as postpone_update() at home, to be done by the thread or before the next use. Blocks the
  // calling thread while the copies of gradients that wait for their updates would have more than `most_copied_bytes`
  // with this one (a larger copy waits until it is alone), and while there is no room for the copy. Returns false, and
  // has updated nothing, where the update cannot be put off. Throws c10::Error in a forked child and in a CUDA graph's
  // capture.
  [[nodiscard]] bool update_later(const at::Tensor& parameter, const at::Tensor& gradient,
                                  const std::vector<Part>& parts, const Update& update);

 private:
  [[nodiscard]] std::shared_ptr<const void> reserve(std::uint64_t bytes, std::uint64_t most_before);
  [[nodiscard]] c10::ThreadPool* thread();

  const std::uint64_t most_copied_bytes_;
  const ProcessMark made_in_;
  Mutex mutex_;
  std::condition_variable changed_;
  std::uint64_t copied_bytes_ EBB_GUARDED_BY(mutex_) = 0;           // reserved for updates that are not done
  std::unique_ptr<c10::ThreadPool> thread_ EBB_GUARDED_BY(mutex_);  // set once, by the first update
};

}  // namespace ebb

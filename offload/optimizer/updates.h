#pragma once

#include <condition_variable>
#include <cstdint>
#include <memory>
#include <unordered_set>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/thread_pool.h>

#include "offload/optimizer.h"
#include "offload/optimizer/part_update.h"
#include "offload/optimizer/parts.h"
#include "offload/optimizer/update_rule.h"
#include "streams/base/mutex.h"
#include "streams/base/process_mark.h"

namespace ebb {

// What the optimizers of every language do: makes the states of parameters, and updates these and the parameters, when
// and where UpdateIn and UpdateOn say. Updates at home that are put off are done by a thread before anybody asks for
// them, one after the other.
//
// Threads: every member may be called from any thread, but a parameter is updated by one thread at a time.
class Updates {
 public:
  static constexpr std::uint64_t kMostCopiedBytes = std::uint64_t{2} << 30;

  // `most_copied_bytes`: of the copies of gradients that wait for their updates at home. A larger copy waits until it
  // is alone.
  Updates(UpdateIn update_in, UpdateOn update_on, std::int64_t elements_at_once = kElementsAtOnce,
          std::uint64_t most_copied_bytes = kMostCopiedBytes);
  ~Updates() { end_thread(); }
  Updates(const Updates&) = delete;
  Updates& operator=(const Updates&) = delete;

  // kInBackward: the gradient has just become whole, and is let go of behind the update.
  enum class Called : bool { kInStep, kInBackward };

  // Updates the parameter by its gradient, or puts the update off: then blocks the calling thread while too many bytes
  // of copies wait, or host memory has no room for this one. `parts`: the parameter's states so far, which get those
  // that are missing. Throws c10::Error for a gradient that is not dense and, in backward, for a parameter's second
  // gradient since end_step(), which stays; in a forked child, if the thread would do the update; and what operations
  // throw.
  void update(const at::Tensor& parameter, std::vector<Part>& parts, const std::shared_ptr<const UpdateRule>& rule,
              Called called);
  void end_step();

  // Ends the thread. Updates that it has not begun are done at their parameters' next uses.
  void end_thread();

 private:
  [[nodiscard]] bool update_in_background(const at::Tensor& parameter, const at::Tensor& gradient,
                                          const std::vector<Part>& parts, const Update& update);
  [[nodiscard]] std::shared_ptr<c10::ThreadPool> thread();
  [[nodiscard]] std::shared_ptr<const void> reserve(std::uint64_t bytes, std::uint64_t most_before);

  const UpdateIn update_in_;
  const UpdateOn update_on_;
  const std::int64_t elements_at_once_;
  const std::uint64_t most_copied_bytes_;
  const ProcessMark made_in_;
  Mutex mutex_;
  std::condition_variable changed_;
  std::unordered_set<const void*> updated_ EBB_GUARDED_BY(mutex_);  // in backward, since the last end_step()
  std::uint64_t copied_bytes_ EBB_GUARDED_BY(mutex_) = 0;           // reserved for updates that are not done
  bool may_have_thread_ EBB_GUARDED_BY(mutex_);
  std::shared_ptr<c10::ThreadPool> thread_ EBB_GUARDED_BY(mutex_);  // null before the first update that it is to do
};

}  // namespace ebb

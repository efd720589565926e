#pragma once

#include <cstdint>
#include <memory>
#include <unordered_set>
#include <vector>

#include <ATen/core/Tensor.h>

#include "offload/optimizer.h"
#include "offload/optimizer/background_updates.h"
#include "offload/optimizer/parts.h"
#include "offload/optimizer/update_rule.h"
#include "streams/base/mutex.h"

namespace ebb {

// What the optimizers of every language do: makes the states of parameters, and updates these and the parameters, when
// and where UpdateIn and UpdateOn say.
//
// Threads: every member may be called from any thread, but a parameter is updated by one thread at a time.
class Updates {
 public:
  Updates(UpdateIn update_in, UpdateOn update_on, std::int64_t elements_at_once = kElementsAtOnce);
  Updates(const Updates&) = delete;
  Updates& operator=(const Updates&) = delete;

  // kInBackward: the gradient has just become whole, and is let go of behind the update.
  enum class Called : bool { kInStep, kInBackward };

  // Updates the parameter by its gradient, or puts the update off. `parts`: the parameter's states so far, which get
  // those that are missing. Throws c10::Error for a gradient that is not dense and, in backward, for a parameter's
  // second gradient since end_step(), which stays; and what operations throw.
  void update(const at::Tensor& parameter, std::vector<Part>& parts, const std::shared_ptr<const UpdateRule>& rule,
              Called called);
  void end_step();

  // Ends the thread that does updates. Those that it has not begun are done at their parameters' next uses.
  void end_thread();

 private:
  [[nodiscard]] bool put_off(const at::Tensor& parameter, const at::Tensor& gradient, const std::vector<Part>& parts,
                             const Update& update);
  [[nodiscard]] bool update_at_home(const at::Tensor& parameter, const at::Tensor& gradient,
                                    const std::vector<Part>& parts, const Update& update);

  const UpdateIn update_in_;
  const UpdateOn update_on_;
  const std::int64_t elements_at_once_;
  Mutex mutex_;
  std::shared_ptr<BackgroundUpdates> background_ EBB_GUARDED_BY(mutex_);
  std::unordered_set<const void*> updated_ EBB_GUARDED_BY(mutex_);  // in backward, since the last end_step()
};

}  // namespace ebb

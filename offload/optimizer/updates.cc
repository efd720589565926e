#include "offload/optimizer/updates.h"

#include <utility>

#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/variable.h>

#include "offload/optimizer/part_update.h"
#include "streams/base/process_mark.h"

namespace ebb {

Updates::Updates(UpdateIn update_in, UpdateOn update_on, std::int64_t elements_at_once)
    : update_in_(update_in), update_on_(update_on), elements_at_once_(elements_at_once) {
  if (update_on == UpdateOn::kCpu && update_in != UpdateIn::kStep) {
    background_ = make_shared_unless_forked<BackgroundUpdates>();
  }
}

void Updates::update(const at::Tensor& parameter, std::vector<Part>& parts,
                     const std::shared_ptr<const UpdateRule>& rule, Called called) {
  if (called == Called::kInBackward) {
    const MutexLock lock(mutex_);
    TORCH_CHECK(updated_.insert(parameter.unsafeGetTensorImpl()).second, "ebb: ", rule->name(),
                " that updates in backward got a parameter's second gradient before step(). Each backward pass is a "
                "step there, so gradients cannot be accumulated: call step() after each, or update in step()");
  }
  const at::NoGradGuard no_grad;
  const at::Tensor gradient = parameter.grad();
  TORCH_CHECK(gradient.layout() == c10::kStrided, "ebb: ", rule->name(),
              " does not support gradients that are sparse, ", "or have another layout: ", gradient.layout());
  Update update{rule, update_on_, /*has_new_states=*/false, elements_at_once_};
  const bool can_wait = !parts.empty() && has_all_states(parts.front(), parameter, *rule);
  if (!can_wait) {
    std::vector<Part> all = parts;
    update.has_new_states = add_states(all, parameter, *rule, elements_at_once_);
    parts = std::move(all);
  }
  const bool is_elsewhere =
      (can_wait && put_off(parameter, gradient, parts, update)) || update_at_home(parameter, gradient, parts, update);
  if (!is_elsewhere) {
    update_now(parameter, gradient, parts, update);
  }
  if (is_elsewhere || update_on_ == UpdateOn::kCpu) {  // otherwise the operations have done so
    torch::autograd::impl::bump_version(parameter);
  }
  if (called == Called::kInBackward) {
    parameter.mutable_grad().reset();
  }
}

// Returns false where the update cannot wait: some of what it takes may be used without being seen.
bool Updates::put_off(const at::Tensor& parameter, const at::Tensor& gradient, const std::vector<Part>& parts,
                      const Update& update) {
  std::shared_ptr<BackgroundUpdates> background;
  {
    const MutexLock lock(mutex_);
    background = background_;
  }
  return (background != nullptr && background->update_later(parameter, gradient, parts, update)) ||
         (update_in_ == UpdateIn::kNextUse &&
          postpone_update(parameter, gradient, parts, update, WorkAt::kDevice) != nullptr);
}

// Returns false where that is not to be, or not possible.
bool Updates::update_at_home(const at::Tensor& parameter, const at::Tensor& gradient, const std::vector<Part>& parts,
                             const Update& update) {
  if (update_on_ == UpdateOn::kDevice || !can_update_at_home(parameter, gradient, parts)) {
    return false;
  }
  const std::shared_ptr<PostponedWork> work = postpone_update(parameter, gradient, parts, update, WorkAt::kHome);
  if (work != nullptr) {
    work->before_use();
  }
  return work != nullptr;
}

void Updates::end_step() {
  const MutexLock lock(mutex_);
  updated_.clear();
}

void Updates::end_thread() {
  std::shared_ptr<BackgroundUpdates> ended;  // destroyed after the lock is released
  const MutexLock lock(mutex_);
  ended = std::move(background_);
}

}  // namespace ebb

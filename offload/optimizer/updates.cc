#include "offload/optimizer/updates.h"

#include <algorithm>
#include <new>
#include <system_error>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/variable.h>

#include "offload/base/interpreter.h"
#include "offload/managed/manage.h"

namespace ebb {

Updates::Updates(UpdateIn update_in, UpdateOn update_on, std::int64_t elements_at_once, std::uint64_t most_copied_bytes)
    : update_in_(update_in),
      update_on_(update_on),
      elements_at_once_(elements_at_once),
      most_copied_bytes_(most_copied_bytes),
      may_have_thread_(update_on == UpdateOn::kCpu && update_in != UpdateIn::kStep) {}

void Updates::update(const at::Tensor& parameter, std::vector<Part>& parts,
                     const std::shared_ptr<const UpdateRule>& rule, Called called) {
  if (called == Called::kInBackward) {
    const LockUnlessForked lock(made_in_, mutex_);
    TORCH_CHECK(updated_.insert(parameter.unsafeGetTensorImpl()).second, "ebb: ", rule->name(),
                " that updates in backward got a parameter's second gradient before step(). Each backward pass is a "
                "step there, so gradients cannot be accumulated: call step() after each, or update in step()");
  }
  const at::NoGradGuard no_grad;
  const at::Tensor gradient = parameter.grad();
  TORCH_CHECK(gradient.layout() == c10::kStrided, "ebb: ", rule->name(),
              " does not support gradients that are sparse, ", "or have another layout: ", gradient.layout());
  Update update{rule, update_on_, /*has_new_states=*/false, elements_at_once_};
  if (std::ranges::all_of(parts, &Part::empty)) {  // which says nothing of how many there are to be
    parts.resize(row_ranges(parameter, elements_at_once_).size());
  }
  const bool can_wait = !parts.empty() && has_all_states(parts.front(), parameter, *rule);
  if (!can_wait) {
    std::vector<Part> all = parts;
    update.has_new_states = add_states(all, parameter, *rule, elements_at_once_);
    parts = std::move(all);
  }
  const bool at_home = update_on_ == UpdateOn::kCpu && can_update_at_home(parameter, gradient, parts);
  const WorkAt place = at_home ? WorkAt::kHome : WorkAt::kDevice;
  const bool is_put_off =
      can_wait &&
      (update_in_background(parameter, gradient, parts, update) ||
       (update_in_ == UpdateIn::kNextUse && postpone_update(parameter, gradient, parts, update, place) != nullptr));
  const bool is_elsewhere = is_put_off || update_at_home(parameter, gradient, parts, update);
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

// Returns false, and has updated nothing, where that is not to be, or not possible.
bool Updates::update_in_background(const at::Tensor& parameter, const at::Tensor& gradient,
                                   const std::vector<Part>& parts, const Update& update) {
  if (update_on_ == UpdateOn::kDevice || update_in_ == UpdateIn::kStep) {
    return false;
  }
  made_in_.check("an optimizer");
  const WithoutInterpreterLock without;  // as in end_thread
  const auto thread = can_update_at_home(parameter, gradient, parts) ? this->thread() : nullptr;
  if (thread == nullptr) {
    return false;
  }
  const std::uint64_t copied_bytes = has_home(gradient) ? 0 : gradient.nbytes();
  const auto postpone = [&] { return postpone_update(parameter, gradient, parts, update, WorkAt::kHome); };
  auto reserved = copied_bytes == 0
                      ? nullptr
                      : reserve(copied_bytes, most_copied_bytes_ - std::min(most_copied_bytes_, copied_bytes));
  std::shared_ptr<PostponedWork> work = postpone();
  if (work == nullptr && copied_bytes != 0) {  // whether there is room must not depend on how far the thread is
    reserved = nullptr;
    reserved = reserve(copied_bytes, 0);
    work = postpone();
  }
  if (work == nullptr) {
    return false;
  }
  try {
    thread->run([work, reserved]() mutable {
      work->run_ahead();
      work = nullptr;  // before what is reserved
    });
  } catch (const std::bad_alloc&) {  // the update is done at the next use
  }
  return true;
}

// Null after end_thread(), and where the system has none.
std::shared_ptr<c10::ThreadPool> Updates::thread() {
  const MutexLock lock(mutex_);
  if (thread_ == nullptr && may_have_thread_) {
    try {
      thread_ = {new c10::ThreadPool(1), UnlessForked()};
    } catch (const std::system_error&) {  // the updates are done at their next uses
    }
  }
  return thread_;
}

// Blocks the calling thread until at most `most_before` bytes are reserved. The bytes are reserved as long as the
// result lives.
std::shared_ptr<const void> Updates::reserve(std::uint64_t bytes, std::uint64_t most_before) {
  const WithoutInterpreterLock without;  // as in end_thread
  {
    const MutexLock lock(mutex_);
    while (copied_bytes_ > most_before) {
      mutex_.wait(changed_);
    }
    copied_bytes_ += bytes;
  }
  return {nullptr, [this, bytes](const void* /*none*/) {
            {
              const MutexLock lock(mutex_);
              copied_bytes_ -= bytes;
            }
            changed_.notify_all();
          }};
}

void Updates::end_step() {
  const LockUnlessForked lock(made_in_, mutex_);
  updated_.clear();
}

void Updates::end_thread() {
  const WithoutInterpreterLock without;    // the thread may be ending an object of the interpreter's
  std::shared_ptr<c10::ThreadPool> ended;  // destroyed after the lock is released
  const LockUnlessForked lock(made_in_, mutex_);
  ended = std::move(thread_);
  may_have_thread_ = false;
}

}  // namespace ebb

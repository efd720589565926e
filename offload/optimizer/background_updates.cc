#include "offload/optimizer/background_updates.h"

#include <algorithm>
#include <iterator>
#include <new>
#include <system_error>
#include <utility>

#include <ATen/ops/clone.h>
#include <c10/util/Exception.h>
#include <c10/util/ScopeExit.h>

#include "offload/base/interpreter.h"
#include "offload/managed/manage.h"
#include "offload/managed/postpone.h"

namespace ebb {

BackgroundUpdates::~BackgroundUpdates() {
  std::thread thread;
  {
    const MutexLock lock(mutex_);
    ends_ = true;
    thread = std::move(thread_);
  }
  changed_.notify_all();
  if (thread.joinable()) {
    const WithoutInterpreterLock without;  // the thread may be ending an object of the interpreter's
    thread.join();
  }
}

bool BackgroundUpdates::update_later(const at::Tensor& parameter, const at::Tensor& gradient,
                                     const std::vector<Part>& parts, const Update& update) {
  made_in_.check("an optimizer");
  if (!can_update_at_home(parameter, gradient, parts) || !has_thread()) {
    return false;
  }
  refuse_capture(parameter);
  release_copied_sources();
  std::shared_ptr<HostCopy> copy;
  if (!has_home(gradient)) {
    copy = copy_of(gradient, parameter);
    if (copy == nullptr) {
      return false;
    }
  }
  const std::uint64_t copied_bytes = copy == nullptr ? 0 : gradient.nbytes();
  auto undo = c10::make_scope_exit([&] { release(copied_bytes); });
  const ToDo next{update_later_at_home(parameter, gradient, copy, parts, update), copied_bytes};
  if (next.work == nullptr) {
    return false;
  }
  try {
    const MutexLock lock(mutex_);
    if (copy != nullptr) {
      copies_.push_back(copy);
    }
    to_do_.push_back(next);
  } catch (const std::bad_alloc&) {  // the update is done at the next use
    return true;
  }
  undo.release();
  changed_.notify_all();
  return true;
}

// With the gradient's bytes reserved; null, with none reserved, where there is no room for the copy.
std::shared_ptr<HostCopy> BackgroundUpdates::copy_of(const at::Tensor& gradient, const at::Tensor& parameter) {
  const std::uint64_t bytes = gradient.nbytes();
  reserve(bytes, most_copied_bytes_ - std::min(most_copied_bytes_, bytes));
  auto undo = c10::make_scope_exit([&] { release(bytes); });
  at::Tensor source;
  try {
    source = gradient.detach().clone(at::MemoryFormat::Contiguous);
  } catch (const c10::OutOfMemoryError&) {
    return nullptr;
  }
  std::shared_ptr<HostCopy> copy = HostCopy::start(parameter, source);
  if (copy == nullptr) {  // whether there is room must not depend on how far the thread is
    release(bytes);
    reserve(bytes, 0);
    copy = HostCopy::start(parameter, source);
  }
  if (copy != nullptr) {
    undo.release();
  }
  return copy;
}

// Blocks the calling thread until at most `most_before` bytes are reserved.
void BackgroundUpdates::reserve(std::uint64_t bytes, std::uint64_t most_before) {
  const WithoutInterpreterLock without;  // as in the destructor
  const MutexLock lock(mutex_);
  while (copied_bytes_ > most_before) {
    mutex_.wait(changed_);
  }
  copied_bytes_ += bytes;
}

void BackgroundUpdates::release(std::uint64_t bytes) {
  {
    const MutexLock lock(mutex_);
    copied_bytes_ -= bytes;
  }
  changed_.notify_all();
}

// Of copies that are over.
void BackgroundUpdates::release_copied_sources() {
  std::vector<std::weak_ptr<HostCopy>> copies;
  {
    const MutexLock lock(mutex_);
    copies.swap(copies_);
  }
  std::erase_if(copies, [](const std::weak_ptr<HostCopy>& each) {
    const std::shared_ptr<HostCopy> copy = each.lock();
    return copy == nullptr || copy->try_to_let_go();
  });
  const MutexLock lock(mutex_);
  copies_.insert(copies_.end(), std::make_move_iterator(copies.begin()), std::make_move_iterator(copies.end()));
}

// Starts the thread with the first update.
bool BackgroundUpdates::has_thread() {
  const MutexLock lock(mutex_);
  if (!thread_.joinable()) {
    try {
      thread_ = std::thread([this] { run(); });
    } catch (const std::system_error&) {
      return false;
    }
  }
  return true;
}

void BackgroundUpdates::run() {
  for (;;) {
    ToDo next;
    {
      const MutexLock lock(mutex_);
      while (to_do_.empty() && !ends_) {
        mutex_.wait(changed_);
      }
      if (ends_) {
        return;
      }
      next = std::move(to_do_.front());
      to_do_.pop_front();
    }
    next.work->run_ahead();
    next.work = nullptr;
    release(next.copied_bytes);
  }
}

}  // namespace ebb

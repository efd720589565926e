#include "offload/optimizer/background_updates.h"

#include <algorithm>
#include <new>
#include <system_error>
#include <utility>

#include <c10/util/ScopeExit.h>

#include "offload/base/interpreter.h"
#include "offload/managed/manage.h"

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
  const std::uint64_t copied_bytes = has_home(gradient) ? 0 : gradient.nbytes();
  reserve(copied_bytes, most_copied_bytes_ - std::min(most_copied_bytes_, copied_bytes));
  auto undo = c10::make_scope_exit([&] { release(copied_bytes); });
  const auto put_off = [&] { return postpone_update(parameter, gradient, parts, update, WorkAt::kHome); };
  ToDo next{put_off(), copied_bytes};
  if (next.work == nullptr && copied_bytes != 0) {  // whether there is room must not depend on how far the thread is
    release(copied_bytes);
    reserve(copied_bytes, 0);
    next.work = put_off();
  }
  if (next.work == nullptr) {
    return false;
  }
  try {
    const MutexLock lock(mutex_);
    to_do_.push_back(next);
  } catch (const std::bad_alloc&) {  // the update is done at the next use
    return true;
  }
  undo.release();
  changed_.notify_all();
  return true;
}

// Blocks the calling thread until at most `most_before` bytes are reserved, unless it asks for none.
void BackgroundUpdates::reserve(std::uint64_t bytes, std::uint64_t most_before) {
  const WithoutInterpreterLock without;  // as in the destructor
  const MutexLock lock(mutex_);
  while (bytes != 0 && copied_bytes_ > most_before) {
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

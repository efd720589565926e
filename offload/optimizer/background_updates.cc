#include "offload/optimizer/background_updates.h"

#include <algorithm>
#include <system_error>
#include <utility>

#include "offload/base/interpreter.h"
#include "offload/managed/manage.h"

namespace ebb {

BackgroundUpdates::~BackgroundUpdates() {
  const WithoutInterpreterLock without;  // the thread may be ending an object of the interpreter's
  thread_ = nullptr;
}

bool BackgroundUpdates::update_later(const at::Tensor& parameter, const at::Tensor& gradient,
                                     const std::vector<Part>& parts, const Update& update) {
  made_in_.check("an optimizer");
  c10::ThreadPool* const thread = can_update_at_home(parameter, gradient, parts) ? this->thread() : nullptr;
  if (thread == nullptr) {
    return false;
  }
  const std::uint64_t copied_bytes = has_home(gradient) ? 0 : gradient.nbytes();
  const auto put_off = [&] { return postpone_update(parameter, gradient, parts, update, WorkAt::kHome); };
  auto reserved = reserve(copied_bytes, most_copied_bytes_ - std::min(most_copied_bytes_, copied_bytes));
  std::shared_ptr<PostponedWork> work = put_off();
  if (work == nullptr && copied_bytes != 0) {  // whether there is room must not depend on how far the thread is
    reserved = nullptr;
    reserved = reserve(copied_bytes, 0);
    work = put_off();
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

// Blocks the calling thread until at most `most_before` bytes are reserved, unless it asks for none. The bytes are
// reserved as long as the result lives.
std::shared_ptr<const void> BackgroundUpdates::reserve(std::uint64_t bytes, std::uint64_t most_before) {
  const WithoutInterpreterLock without;  // as in the destructor
  {
    const MutexLock lock(mutex_);
    while (bytes != 0 && copied_bytes_ > most_before) {
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

// Null where the system has none.
c10::ThreadPool* BackgroundUpdates::thread() {
  const MutexLock lock(mutex_);
  if (thread_ == nullptr) {
    try {
      thread_ = std::make_unique<c10::ThreadPool>(1);
    } catch (const std::system_error&) {
      return nullptr;
    }
  }
  return thread_.get();
}

}  // namespace ebb

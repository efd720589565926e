#include "offload/optimizer/background.h"

#include <utility>

#include "offload/interpreter.h"

namespace ebb {

Background::~Background() {
  std::thread thread;
  {
    const MutexLock lock(mutex_);
    ends_ = true;
    thread = std::move(thread_);
  }
  changed_.notify_one();
  if (thread.joinable()) {
    const WithoutInterpreterLock without;  // the thread may be ending an object of the interpreter's
    thread.join();
  }
}

void Background::add(std::shared_ptr<PostponedWork> work) {
  const MutexLock lock(mutex_);
  to_do_.push_back(std::move(work));
  if (!thread_.joinable()) {
    thread_ = std::thread([this] { run(); });
  }
  changed_.notify_one();
}

void Background::run() {
  for (;;) {
    std::shared_ptr<PostponedWork> work;
    {
      const MutexLock lock(mutex_);
      while (to_do_.empty() && !ends_) {
        mutex_.wait(changed_);
      }
      if (ends_) {
        return;
      }
      work = std::move(to_do_.front());
      to_do_.pop_front();
    }
    work->run_ahead();
  }
}

}  // namespace ebb

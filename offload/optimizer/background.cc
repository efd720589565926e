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

void Background::add(UpdateLater update) {
  made_in_.check("an optimizer");
  std::vector<std::shared_ptr<HostCopy>> done;  // destroyed after the lock is released
  const MutexLock lock(mutex_);
  to_do_.push_back(std::move(update.work));
  for (std::shared_ptr<HostCopy>& copy : copies_) {
    if (copy->try_to_let_go()) {
      done.push_back(std::move(copy));
    }
  }
  std::erase(copies_, nullptr);
  if (update.copy != nullptr) {
    copies_.push_back(std::move(update.copy));
  }
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

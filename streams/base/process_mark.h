#pragma once

#include <pthread.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <utility>

#include "streams/base/mutex.h"

namespace ebb {

// Remembers the process in which an object was made.
//
// Note [Forked children]
// A forked child has copies of its parent's objects, but none of the threads that serve them and no CUDA context; and a
// mutex that another thread held during the fork stays locked there for ever. So in a child, code that would
// wait or lock asks its mark first: a call throws one clear error, and a destructor leaks what it would have to wait
// for. The child's memory is a copy, so a leak there takes nothing from the parent.
//
// Threads: every member may be called from any thread. Costs a relaxed load.
class ProcessMark {
 public:
  ProcessMark() noexcept : made_after_(forks_.load(std::memory_order_relaxed)) {
    // Registered once a process; a child inherits the handler, which runs before anything else does: only an atomic
    // increment is async-signal-safe enough. Registration fails only where there is no memory for the entry: forks then
    // go unnoticed.
    [[maybe_unused]] static const int installed =
        ::pthread_atfork(nullptr, nullptr, [] { forks_.fetch_add(1, std::memory_order_relaxed); });
  }

  // Whether this process was forked since the mark was made.
  [[nodiscard]] bool forked() const noexcept { return forks_.load(std::memory_order_relaxed) != made_after_; }

  // Throws c10::Error, which says "ebb: `what` was made before fork", in a forked child.
  void check(const char* what) const {
    if (forked()) {
      refuse(what);
    }
  }

  // Locks `mutex`. A forked child may go on as long as the mutex is free: throws as `check` where another thread of the
  // parent may have held the mutex.
  void lock(Mutex& mutex, const char* what) const EBB_ACQUIRE(mutex) {
    if (!forked()) {
      mutex.lock();
    } else if (!mutex.try_lock()) {
      refuse(what);
    }
  }

 private:
  [[noreturn]] static void refuse(const char* what);

  static std::atomic<std::uint64_t> forks_;  // between the first process and this one
  std::uint64_t made_after_;
};

// The one T of this process, which is made when first asked for and never destroyed: code may run at any time, also at
// exit. A forked child makes one of its own, because the locks of its parent's may never be released there.
//
// Threads: any.
template <typename T>
class PerProcess {
 public:
  static T& here() {
    T* known = here_;
    if (known == nullptr) {
      [[maybe_unused]] static const int registered = ::pthread_atfork(nullptr, nullptr, [] {
        of_parent_ = here_ == nullptr ? of_parent_ : here_.load();
        here_ = nullptr;
      });
      auto* const made = new T;
      if (here_.compare_exchange_strong(known, made)) {
        return *made;
      }
      delete made;
    }
    return *known;
  }

  // The one of the process that this one was forked from; null for none.
  static T* of_parent() { return of_parent_; }

 private:
  static inline std::atomic<T*> here_{nullptr};
  static inline T* of_parent_ = nullptr;
};

// Holds a mutex from its construction to its end. In a forked child, which has one thread, and where another thread of
// the parent may have held the mutex for ever, the lock holds nothing.
class EBB_THREAD_SAFETY(scoped_lockable) LockUnlessForked {
 public:
  LockUnlessForked(const ProcessMark& made_in, Mutex& mutex) EBB_ACQUIRE(mutex)
      : mutex_(made_in.forked() ? nullptr : &mutex) {
    if (mutex_ != nullptr) {
      mutex_->lock();
    }
  }
  ~LockUnlessForked() EBB_RELEASE() {
    if (mutex_ != nullptr) {
      mutex_->unlock();
    }
  }
  LockUnlessForked(const LockUnlessForked&) = delete;
  LockUnlessForked& operator=(const LockUnlessForked&) = delete;

 private:
  Mutex* const mutex_;
};

// A deleter that leaks in a forked child: Note [Forked children].
struct UnlessForked {
  ProcessMark made_in;

  template <typename T>
  void operator()(T* object) const {
    if (!made_in.forked()) {
      delete object;
    }
  }
};

// An allocator that leaks in a forked child, for std::allocate_shared, which puts an object and its counts into one
// allocation: Note [Forked children].
template <typename T>
struct AllocatorUnlessForked : std::allocator<T> {
  ProcessMark made_in;

  AllocatorUnlessForked() = default;
  template <typename U>
  AllocatorUnlessForked(const AllocatorUnlessForked<U>& other) noexcept : made_in(other.made_in) {}

  void deallocate(T* memory, std::size_t count) noexcept {
    if (!made_in.forked()) {
      std::allocator<T>::deallocate(memory, count);
    }
  }
  template <typename U>
  void destroy(U* object) noexcept {
    if (!made_in.forked()) {
      std::destroy_at(object);
    }
  }
};

// As std::make_shared, but a forked child never destroys the object.
template <typename T, typename... Arguments>
[[nodiscard]] std::shared_ptr<T> make_shared_unless_forked(Arguments&&... arguments) {
  return std::allocate_shared<T>(AllocatorUnlessForked<T>{}, std::forward<Arguments>(arguments)...);
}

}  // namespace ebb

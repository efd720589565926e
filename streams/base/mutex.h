#pragma once

#include <condition_variable>
#include <mutex>
#include <shared_mutex>

// Locks whose use clang checks. An annotation names the lock that a variable or a function needs, and `./dev lint
// --locks` fails where code does not hold that lock. Annotations are empty for other compilers.
//
// Source: clang's documentation, "Thread Safety Analysis" (https://clang.llvm.org/docs/ThreadSafetyAnalysis.html). Its
// limits: clang looks at one function at a time, so a lambda names the locks that its caller holds; clang skips
// constructors and destructors; and clang takes two expressions for two locks, even if both refer to the same lock.

#ifdef __clang__
#define EBB_THREAD_SAFETY(attribute) __attribute__((attribute))
#else
#define EBB_THREAD_SAFETY(attribute)
#endif

// On a variable: readers hold or share the lock, and writers hold the lock.
#define EBB_GUARDED_BY(mutex) EBB_THREAD_SAFETY(guarded_by(mutex))

// On a pointer: readers of the object that the pointer leads to hold or share the lock, and writers hold the lock.
#define EBB_PT_GUARDED_BY(mutex) EBB_THREAD_SAFETY(pt_guarded_by(mutex))

// On a lock: a thread takes this lock before those that are named.
#define EBB_ACQUIRED_BEFORE(...) EBB_THREAD_SAFETY(acquired_before(__VA_ARGS__))

// On a function or a lambda: the caller holds the locks.
#define EBB_REQUIRES(...) EBB_THREAD_SAFETY(requires_capability(__VA_ARGS__))

// On a function or a lambda: the caller holds none of the locks.
#define EBB_EXCLUDES(...) EBB_THREAD_SAFETY(locks_excluded(__VA_ARGS__))

// On a function that takes the locks or lets go of them. Where no lock is named, the function's object is the lock.
#define EBB_ACQUIRE(...) EBB_THREAD_SAFETY(acquire_capability(__VA_ARGS__))
#define EBB_ACQUIRE_SHARED(...) EBB_THREAD_SAFETY(acquire_shared_capability(__VA_ARGS__))
#define EBB_TRY_ACQUIRE(result) EBB_THREAD_SAFETY(try_acquire_capability(result))
#define EBB_TRY_ACQUIRE_SHARED(result) EBB_THREAD_SAFETY(try_acquire_shared_capability(result))
#define EBB_RELEASE(...) EBB_THREAD_SAFETY(release_capability(__VA_ARGS__))
#define EBB_RELEASE_SHARED(...) EBB_THREAD_SAFETY(release_shared_capability(__VA_ARGS__))

namespace ebb {

// A mutex of the standard library, at its cost.
//
// Threads: as `Standard`.
template <typename Standard>
class EBB_THREAD_SAFETY(capability("mutex")) BasicMutex {
 public:
  void lock() EBB_ACQUIRE() { standard_.lock(); }
  void unlock() EBB_RELEASE() { standard_.unlock(); }

  // False where another thread holds it. Clang follows the result only from the condition of an `if`.
  [[nodiscard]] bool try_lock() EBB_TRY_ACQUIRE(true) { return standard_.try_lock(); }

  // std::shared_mutex alone.
  void lock_shared() EBB_ACQUIRE_SHARED() { standard_.lock_shared(); }
  [[nodiscard]] bool try_lock_shared() EBB_TRY_ACQUIRE_SHARED(true) { return standard_.try_lock_shared(); }
  void unlock_shared() EBB_RELEASE_SHARED() { standard_.unlock_shared(); }

  // std::mutex alone. Lets other threads have the mutex until `condition` is notified, or for a while: the caller
  // checks in a loop whether its wait is over.
  void wait(std::condition_variable& condition) EBB_REQUIRES(this) {
    std::unique_lock lock(standard_, std::adopt_lock);
    condition.wait(lock);
    static_cast<void>(lock.release());
  }

 private:
  Standard standard_;
};

using Mutex = BasicMutex<std::mutex>;
using SharedMutex = BasicMutex<std::shared_mutex>;

// Holds a mutex from its construction to its end.
template <typename AnyMutex>
class EBB_THREAD_SAFETY(scoped_lockable) MutexLock {
 public:
  explicit MutexLock(AnyMutex& mutex) EBB_ACQUIRE(mutex) : mutex_(mutex) { mutex_.lock(); }

  // Adopts a mutex that try_lock has taken.
  MutexLock(AnyMutex& mutex, std::adopt_lock_t /*held*/) EBB_REQUIRES(mutex) : mutex_(mutex) {}

  ~MutexLock() EBB_RELEASE() { mutex_.unlock(); }
  MutexLock(const MutexLock&) = delete;
  MutexLock& operator=(const MutexLock&) = delete;

 private:
  AnyMutex& mutex_;
};

// Shares a mutex from its construction to its end.
class EBB_THREAD_SAFETY(scoped_lockable) SharedLock {
 public:
  explicit SharedLock(SharedMutex& mutex) EBB_ACQUIRE_SHARED(mutex) : mutex_(mutex) { mutex_.lock_shared(); }
  ~SharedLock() EBB_RELEASE() { mutex_.unlock_shared(); }
  SharedLock(const SharedLock&) = delete;
  SharedLock& operator=(const SharedLock&) = delete;

 private:
  SharedMutex& mutex_;
};

}  // namespace ebb

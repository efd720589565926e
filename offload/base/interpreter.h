#pragma once

#include <atomic>
#include <cstddef>
#include <exception>

namespace ebb {

// An interpreter that runs in this process, and its lock: Python and the GIL. A binding of ebb to an interpreter sets
// these, once, before the first Offloader.
//
// Note [The interpreter's lock]
// A policy or a checkpointed function that is written in Python takes the GIL, and ebb calls these with locks of its
// own held: Decider::policy_mutex_, Region::run_mutex_ and SavedStorage::recompute_mutex_. Work that was put off may
// take the GIL as well, under PostponedWork::mutex_: it uses tensors that Python has, too. A thread that had the GIL
// and waited for such a lock would wait for ever. Autograd mostly saves without the GIL, but a custom Function of
// Python's packs and unpacks with the GIL held. So a hook releases the GIL before it takes one of these four locks, and
// takes the GIL back when the hook is done. Code that takes only other locks, such as the end of a save, keeps the GIL:
// nothing that takes the GIL is called under those. So a device meter, which the end of a save may ask, must not be
// written in Python. Nor is a weak reference to a tensor or a storage made strong under those, or a strong one
// destroyed: where an object of Python's has the only other reference, LibTorch takes the GIL to count it. Nor is
// device memory asked for under those: with its memory history on (torch.cuda.memory._record_memory_history),
// LibTorch's allocator takes the GIL. An exception lies under SavedStorage::mutex_: an unpack makes the reference to
// what it has handed out strong, of which the program may have the storage object of Python's alone.
struct Interpreter {
  // Releases the lock if the calling thread has it, and returns the argument for take_back. Returns null if the thread
  // does not have the lock.
  void* (*let_go)();
  void (*take_back)(void*);

  // How many references there are to a living object. Called with the lock or without, and takes no lock.
  std::size_t (*references)(const void* object);

  // As the functions of these names below. Called with the lock or without.
  void (*leave_function)();
  bool (*is_leaving)(const std::exception_ptr& thrown);

  static inline std::atomic<const Interpreter*> here{nullptr};  // null for none; never destroyed
};
void set_interpreter(const Interpreter& interpreter);

// While a WithoutInterpreterLock lives, the calling thread does not have the interpreter's lock.
class WithoutInterpreterLock {
 public:
  WithoutInterpreterLock() : held_(interpreter_ == nullptr ? nullptr : interpreter_->let_go()) {}
  ~WithoutInterpreterLock() {
    if (held_ != nullptr) {
      interpreter_->take_back(held_);
    }
  }
  WithoutInterpreterLock(const WithoutInterpreterLock&) = delete;
  WithoutInterpreterLock& operator=(const WithoutInterpreterLock&) = delete;

 private:
  const Interpreter* const interpreter_ = Interpreter::here;
  void* const held_;  // null where there is nothing to take back
};

// Leaves a checkpointed function that runs again, from inside of it. What is thrown is no std::exception, or in an
// interpreter no error of those that programs catch: a function that handles its own errors takes it for none of them.
[[noreturn]] void leave_function();

// Whether this was thrown by leave_function().
[[nodiscard]] bool is_leaving(const std::exception_ptr& thrown);

// What the text of the exception has in it, so that a TorchScript function's own exception is known, which has the
// text.
inline constexpr const char* kLeavingText = "ebb.checkpoint: the function has saved all that backward needs";

}  // namespace ebb

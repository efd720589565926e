#pragma once

namespace ebb {

// The lock of an interpreter that runs in this process: Python's GIL. Whoever binds ebb to one sets it, once, before
// the first Offloader.
//
// Note [The interpreter's lock]
// A policy or a checkpointed function that is written in Python takes the GIL, and ebb calls both with locks of its own
// held (docs/threads.md, row 1). A thread that had the GIL and waited for such a lock would wait for ever. Autograd
// mostly saves without the GIL, but a custom Function of Python's packs and unpacks with it. So a hook lets go of the
// GIL before it takes a lock of row 1, and takes it back when it is done. What takes only later rows, such as the end
// of a save, keeps it: nothing that takes the GIL is called under those. (So a device meter, which the end of a save
// may ask, must not be Python's.)
struct InterpreterLock {
  // Lets go of the lock if the calling thread has it, and returns what take_back needs; null if it has not.
  void* (*let_go)() = nullptr;
  void (*take_back)(void*) = nullptr;
};
void set_interpreter_lock(InterpreterLock lock);

// While it lives, the calling thread does not have the interpreter's lock.
class WithoutInterpreterLock {
 public:
  WithoutInterpreterLock();
  ~WithoutInterpreterLock();
  WithoutInterpreterLock(const WithoutInterpreterLock&) = delete;
  WithoutInterpreterLock& operator=(const WithoutInterpreterLock&) = delete;

 private:
  void* const held_;  // null where there is nothing to take back
};

}  // namespace ebb

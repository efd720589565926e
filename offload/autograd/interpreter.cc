#include "offload/interpreter.h"

#include <atomic>

namespace ebb {
namespace {

std::atomic<void* (*)()> let_go{nullptr};
std::atomic<void (*)(void*)> take_back{nullptr};

void* let_go_here() {
  auto* const function = let_go.load(std::memory_order_acquire);
  return function == nullptr ? nullptr : function();
}

}  // namespace

void set_interpreter_lock(InterpreterLock lock) {
  take_back = lock.take_back;
  let_go = lock.let_go;  // last: other threads read let_go first
}

WithoutInterpreterLock::WithoutInterpreterLock() : held_(let_go_here()) {}

WithoutInterpreterLock::~WithoutInterpreterLock() {
  if (held_ != nullptr) {
    take_back.load(std::memory_order_relaxed)(held_);
  }
}

}  // namespace ebb

#include "offload/interpreter.h"

#include <atomic>

namespace ebb {
namespace {

std::atomic<void* (*)()> let_go{nullptr};
std::atomic<void (*)(void*)> take_back{nullptr};
std::atomic<void (*)()> leave_by_interpreter{nullptr};

// No std::exception (leave_function).
struct FunctionIsLeft {};

void* let_go_here() {
  auto* const function = let_go.load(std::memory_order_acquire);
  return function == nullptr ? nullptr : function();
}

}  // namespace

void set_interpreter(Interpreter interpreter) {
  leave_by_interpreter = interpreter.leave_function;
  take_back = interpreter.take_back;
  let_go = interpreter.let_go;  // last: other threads read let_go first
}

void leave_function() {
  if (auto* const function = leave_by_interpreter.load(std::memory_order_acquire)) {
    function();
  }
  throw FunctionIsLeft();
}

WithoutInterpreterLock::WithoutInterpreterLock() : held_(let_go_here()) {}

WithoutInterpreterLock::~WithoutInterpreterLock() {
  if (held_ != nullptr) {
    take_back.load(std::memory_order_relaxed)(held_);
  }
}

}  // namespace ebb

#include "offload/base/interpreter.h"

#include <string_view>

namespace ebb {
namespace {

std::atomic<std::size_t (*)(const void*)> references{nullptr};
std::atomic<void (*)()> leave_by_interpreter{nullptr};
std::atomic<bool (*)(const std::exception_ptr&)> is_interpreters{nullptr};

// No std::exception (leave_function).
struct FunctionIsLeft {};

}  // namespace

void set_interpreter(Interpreter interpreter) {
  leave_by_interpreter = interpreter.leave_function;
  is_interpreters = interpreter.is_leaving;
  references = interpreter.references;
  WithoutInterpreterLock::take_back_ = interpreter.take_back;
  WithoutInterpreterLock::let_go_ = interpreter.let_go;  // last: other threads read let_go_ first
}

bool is_idle(const void* object) {
  auto* const function = references.load(std::memory_order_acquire);
  return function != nullptr && function(object) == 1;
}

void leave_function() {
  if (auto* const function = leave_by_interpreter.load(std::memory_order_acquire)) {
    function();
  }
  throw FunctionIsLeft();
}

bool is_leaving(const std::exception_ptr& thrown) {
  if (thrown == nullptr) {  // no exception of C++'s: a thread that is being ended
    return false;
  }
  if (auto* const function = is_interpreters.load(std::memory_order_acquire); function != nullptr && function(thrown)) {
    return true;
  }
  try {
    std::rethrow_exception(thrown);
  } catch (const FunctionIsLeft&) {
    return true;
  } catch (const std::exception& error) {
    return std::string_view(error.what()).find(kLeavingText) != std::string_view::npos;
  } catch (...) {
    return false;
  }
}

}  // namespace ebb

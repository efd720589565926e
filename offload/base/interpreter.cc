#include "offload/base/interpreter.h"

#include <string_view>

namespace ebb {
namespace {

// No std::exception (leave_function).
struct FunctionIsLeft {};

}  // namespace

void set_interpreter(const Interpreter& interpreter) { Interpreter::here = new Interpreter(interpreter); }

void leave_function() {
  if (const Interpreter* const interpreter = Interpreter::here) {
    interpreter->leave_function();
  }
  throw FunctionIsLeft();
}

bool is_leaving(const std::exception_ptr& thrown) {
  if (thrown == nullptr) {  // no exception of C++'s: a thread that is being ended
    return false;
  }
  if (const Interpreter* const interpreter = Interpreter::here; interpreter && interpreter->is_leaving(thrown)) {
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

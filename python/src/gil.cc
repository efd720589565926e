#include "python/src/gil.h"

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pythoncapi_compat.h>

#include "offload/base/interpreter.h"

namespace ebb::python {

bool interpreter_runs() { return Py_IsInitialized() != 0 && Py_IsFinalizing() == 0; }

namespace {

PyObject* end_of_region = nullptr;  // the class of the exception

// By an exception that `except Exception` does not catch.
[[noreturn]] void leave_function_by_python() {
  const py::gil_scoped_acquire gil;
  PyErr_SetString(end_of_region, kLeavingText);
  python_error for_torch;
  for_torch.persist();
  throw for_torch;
}

bool is_leaving_by_python(const std::exception_ptr& thrown) {
  try {
    std::rethrow_exception(thrown);
  } catch (const python_error& error) {
    const py::gil_scoped_acquire gil;
    return PyErr_GivenExceptionMatches(error.type, end_of_region) != 0;
  } catch (...) {
    return false;
  }
}

}  // namespace

void register_interpreter(py::module_& module) {
  end_of_region = PyErr_NewExceptionWithDoc("ebb.EndOfRegion",
                                            "Leaves a function of ebb.checkpoint(early_stop=True) that runs again.",
                                            PyExc_BaseException, nullptr);
  if (end_of_region == nullptr) {
    throw py::error_already_set();
  }
  module.attr("EndOfRegion") = py::handle(end_of_region);
  set_interpreter({
      .let_go = []() -> void* { return interpreter_runs() && PyGILState_Check() != 0 ? PyEval_SaveThread() : nullptr; },
      .take_back = [](void* state) { PyEval_RestoreThread(static_cast<PyThreadState*>(state)); },
      .references = [](const void* object) -> std::size_t {
        return static_cast<std::size_t>(Py_REFCNT(static_cast<PyObject*>(const_cast<void*>(object))));
      },
      .leave_function = &leave_function_by_python,
      .is_leaving = &is_leaving_by_python,
  });
}

Shared::Shared(py::object object)
    : object_(object.release().ptr(), [](PyObject* each) {
        if (interpreter_runs()) {
          const py::gil_scoped_acquire gil;
          Py_DECREF(each);
        }
      }) {}

void rethrow_for_torch(py::error_already_set& error) {
  error.restore();
  python_error for_torch;
  for_torch.persist();
  throw for_torch;
}

}  // namespace ebb::python

#include "python/src/gil.h"

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pythoncapi_compat.h>

#include "offload/interpreter.h"

namespace ebb::python {

bool interpreter_runs() { return Py_IsInitialized() != 0 && Py_IsFinalizing() == 0; }

namespace {

// By an exception as GeneratorExit, which `except Exception` does not catch.
[[noreturn]] void leave_function_by_python() {
  const py::gil_scoped_acquire gil;
  PyErr_SetString(PyExc_GeneratorExit, "ebb.checkpoint: nothing that the function would do from here on is needed");
  python_error for_torch;
  for_torch.persist();
  throw for_torch;
}

}  // namespace

void register_interpreter() {
  set_interpreter({
      .let_go = []() -> void* { return interpreter_runs() && PyGILState_Check() != 0 ? PyEval_SaveThread() : nullptr; },
      .take_back = [](void* state) { PyEval_RestoreThread(static_cast<PyThreadState*>(state)); },
      .leave_function = &leave_function_by_python,
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

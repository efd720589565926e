#include "python/src/gil.h"

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pythoncapi_compat.h>

#include "offload/interpreter.h"

namespace ebb::python {

bool interpreter_runs() { return Py_IsInitialized() != 0 && Py_IsFinalizing() == 0; }

void let_go_of_gil_in_hooks() {
  set_interpreter_lock({
      .let_go = []() -> void* { return interpreter_runs() && PyGILState_Check() != 0 ? PyEval_SaveThread() : nullptr; },
      .take_back = [](void* state) { PyEval_RestoreThread(static_cast<PyThreadState*>(state)); },
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

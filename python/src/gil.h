#pragma once

#include <memory>
#include <utility>

#include <torch/csrc/utils/pybind.h>

namespace ebb::python {

// While the interpreter ends, its lock is not to be had: a thread that asks for it is ended.
[[nodiscard]] bool interpreter_runs();

// Tells ebb of Python: how a thread lets go of the GIL (Note [The interpreter's lock] in offload/base/interpreter.h),
// and how a function of Python's is left.
void register_interpreter(py::module_& module);

// A Python object that any thread may copy and let go of, with the GIL or without. One that outlives the interpreter is
// leaked.
class Shared {
 public:
  explicit Shared(py::object object);

  // Needs the GIL.
  [[nodiscard]] py::handle get() const { return object_.get(); }

 private:
  std::shared_ptr<PyObject> object_;
};

// Throws the Python error that `error` holds as LibTorch does, so that it reaches Python as it is from any thread.
// Needs the GIL.
[[noreturn]] void rethrow_for_torch(py::error_already_set& error);

// Deletes without the GIL, which a destructor that waits must not have.
struct DeleteWithoutGil {
  template <typename T>
  void operator()(T* object) const {
    if (interpreter_runs() && PyGILState_Check() != 0) {
      const py::gil_scoped_release without;
      delete object;
    } else {
      delete object;
    }
  }
};

}  // namespace ebb::python

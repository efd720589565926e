#pragma once

#include <torch/csrc/utils/pybind.h>

// Note [What the bindings include]
// Python's optimizers are torch's classes over ebb's updates, and Python tells ebb of torch's own optimizers' states.
// No program in C++ needs these parts, so no public header has them, and the bindings, which are built and shipped with
// the library, include the private ones.

namespace ebb::python {

void log_to_stderr();
void bind_policies(py::module_& module);
void bind_stats(py::module_& module);
void bind_options(py::module_& module);
void bind_offloader(py::module_& module);  // after the others
void bind_optimizer(py::module_& module);
void bind_autograd(py::module_& module);

}  // namespace ebb::python

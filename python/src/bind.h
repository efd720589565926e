#pragma once

#include <torch/csrc/utils/pybind.h>

namespace ebb::python {

void log_to_stderr();
void bind_policies(py::module_& module);
void bind_stats(py::module_& module);
void bind_options(py::module_& module);
void bind_offloader(py::module_& module);  // after the others
void bind_optimizer(py::module_& module);
void bind_autograd(py::module_& module);

}  // namespace ebb::python

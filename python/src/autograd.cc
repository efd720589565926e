// Checkpointed regions, and where backward begins and ends.
#include <optional>
#include <utility>
#include <vector>

#include <pybind11/stl.h>

#include "offload/backward.h"
#include "offload/base/backward_pass.h"
#include "offload/checkpoint.h"
#include "python/src/bind.h"
#include "python/src/gil.h"

namespace ebb::python {
namespace {

// `function` takes and returns lists of tensors. Called without the GIL, on any thread.
std::vector<at::Tensor> run(const Shared& function, const std::vector<at::Tensor>& inputs) {
  const py::gil_scoped_acquire gil;
  try {
    return function.get()(inputs).cast<std::vector<at::Tensor>>();
  } catch (py::error_already_set& error) {
    // In backward others may make room, and the function is called again.
    if (in_backward() && error.matches(py::module_::import("torch").attr("OutOfMemoryError"))) {
      TORCH_CHECK_WITH(OutOfMemoryError, false, error.what());
    }
    rethrow_for_torch(error);
  }
}

CheckpointedFunction function_of(py::object function) {
  return [shared = Shared(std::move(function))](const std::vector<at::Tensor>& given) { return run(shared, given); };
}

std::vector<at::Tensor> checkpoint(py::object function, const std::vector<at::Tensor>& inputs, bool early_stop) {
  CheckpointedFunction called = function_of(std::move(function));
  const py::gil_scoped_release released;
  return ebb::checkpoint(std::move(called), inputs, early_stop ? EarlyStop::kYes : EarlyStop::kNo);
}

std::vector<at::Tensor> recomputable(py::object function, const std::vector<at::Tensor>& inputs) {
  CheckpointedFunction called = function_of(std::move(function));
  const py::gil_scoped_release released;
  return ebb::recomputable(std::move(called), inputs);
}

// Calls run(*arguments, **named), which is one backward pass.
py::object run_backward(const py::function& run, const py::args& arguments, const py::kwargs& named) {
  std::optional<Backward> backward;
  {
    const py::gil_scoped_release released;
    backward.emplace();
  }
  const auto end = [&backward] {
    const py::gil_scoped_release released;
    backward.reset();
  };
  try {
    py::object result = run(*arguments, **named);
    end();
    return result;
  } catch (...) {
    backward->fail();
    end();
    throw;
  }
}

}  // namespace

void bind_autograd(py::module_& module) {
  module.def("checkpoint", &checkpoint, py::arg("function"), py::arg("inputs"), py::arg("early_stop"));
  module.def("recomputable", &recomputable, py::arg("function"), py::arg("inputs"));
  module.def("run_backward", &run_backward);
}

}  // namespace ebb::python

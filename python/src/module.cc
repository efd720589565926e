#include <exception>
#include <stdexcept>

#include <torch/csrc/Exceptions.h>

#include "python/src/bind.h"
#include "python/src/gil.h"

namespace ebb::python {
namespace {

// Options that cannot be used are ValueErrors; the rest is what LibTorch makes of it: RuntimeError for c10::Error,
// torch.OutOfMemoryError, and what a policy or a checkpointed function of Python's has raised.
void translate(std::exception_ptr pointer) {
  try {
    std::rethrow_exception(pointer);
  } catch (const py::builtin_exception&) {
    throw;
  } catch (const std::invalid_argument& error) {
    PyErr_SetString(PyExc_ValueError, error.what());
  } catch (...) {
    torch::translate_exception_to_python(pointer);
  }
}

}  // namespace
}  // namespace ebb::python

PYBIND11_MODULE(_core, module) {
  using namespace ebb::python;
  py::register_local_exception_translator(&translate);
  log_to_stderr();
  register_interpreter(module);
  bind_policies(module);
  bind_stats(module);
  bind_options(module);
  bind_offloader(module);
  bind_optimizer(module);
  bind_autograd(module);
}

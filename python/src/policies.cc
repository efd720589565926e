// Policies, those that are Python functions among them.
#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include <pybind11/stl.h>

#include "policy/policies.h"
#include "python/src/bind.h"
#include "python/src/gil.h"

namespace ebb::python {
namespace {

// What a function gets: a copy, because it may keep it.
struct CandidateCopy {
  std::uint64_t bytes;
  std::uint64_t ordinal;
  std::string operation;
  Recompute recompute;
};

std::string to_text(const CandidateCopy& candidate) {
  return "Candidate(bytes=" + std::to_string(candidate.bytes) + ", ordinal=" + std::to_string(candidate.ordinal) +
         ", operation='" + candidate.operation + "')";
}

Decision decision_of(py::handle answer) {
  if (PyBool_Check(answer.ptr())) {
    return answer.ptr() == Py_True ? Decision::kOffload : Decision::kKeep;
  }
  if (py::isinstance<Decision>(answer)) {
    return answer.cast<Decision>();
  }
  throw py::type_error("ebb: a policy returned " + std::string(py::repr(answer)) +
                       ", and must return True (offload), False (keep) or an ebb.Decision");
}

// Called with the offloader's lock for its policy held, and without the GIL.
Decision ask(const Shared& function, const Candidate& candidate) {
  const py::gil_scoped_acquire gil;
  try {
    try {
      const CandidateCopy copy{candidate.bytes, candidate.ordinal, std::string(candidate.operation),
                               candidate.recompute};
      return decision_of(function.get()(copy));
    } catch (py::builtin_exception& error) {
      error.set_error();
      throw py::error_already_set();
    }
  } catch (py::error_already_set& error) {
    rethrow_for_torch(error);
  }
}

std::shared_ptr<Policy> python_policy(py::object function, std::shared_ptr<Policy> inner) {
  return callback(
      [function = Shared(std::move(function))](const Candidate& candidate) { return ask(function, candidate); },
      std::move(inner));
}

}  // namespace

void bind_policies(py::module_& module) {
  py::enum_<Decision>(module, "Decision", "What becomes of a storage.")
      .value("KEEP", Decision::kKeep, "It stays in device memory.")
      .value("OFFLOAD", Decision::kOffload, "It leaves, if there is room for it.")
      .value("RECOMPUTE", Decision::kRecompute,
             "It is dropped, and computed again in backward; it is kept where that cannot be done.");
  py::enum_<Recompute>(module, "Recompute", "What computing a storage again takes.")
      .value("NO", Recompute::kNo, "It cannot be done.")
      .value("MEMORY_BOUND", Recompute::kMemoryBound, "About a pass over its inputs.")
      .value("COMPUTE_BOUND", Recompute::kComputeBound, "Matrix products, attention, convolutions.");
  py::class_<CandidateCopy>(module, "Candidate", "A storage that autograd saves, at the moment of its first save.")
      .def_readonly("bytes", &CandidateCopy::bytes, "Bytes of the whole storage.")
      .def_readonly("ordinal", &CandidateCopy::ordinal, "How many storages this step has asked about before it.")
      .def_readonly("operation", &CandidateCopy::operation,
                    "Name of the autograd node that made the tensor ('MmBackward0'), '' if none.")
      .def_readonly("recompute", &CandidateCopy::recompute,
                    "What computing it again takes; NO unless the policy wraps recompute().")
      .def("__repr__", &to_text);
  py::class_<Policy, std::shared_ptr<Policy>>(module, "Policy", "Decides which storages leave the device.");

  module.def("offload_everything", &offload_everything);
  module.def("keep_everything", &keep_everything, py::arg("least_bytes"));
  module.def("minimum_size", &minimum_size, py::arg("bytes"), py::arg("inner"));
  module.def("only_operations", &only_operations, py::arg("names"), py::arg("inner"));
  module.def("except_operations", &except_operations, py::arg("names"), py::arg("inner"));
  module.def("recompute", &recompute, py::arg("dearest"), py::arg("inner"));
  module.def("python_policy", &python_policy, py::arg("function"), py::arg("inner"));
}

}  // namespace ebb::python

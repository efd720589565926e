#include "offload/offloader.h"

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include <pybind11/stl.h>

#include "offload/base/managed_key.h"
#include "offload/guard.h"
#include "offload/managed/manage.h"
#include "offload/optimizer_step.h"
#include "offload/parameters.h"
#include "offload/recompute/operation_log.h"
#include "python/src/bind.h"
#include "python/src/gil.h"

namespace ebb::python {
namespace {

using Released = py::call_guard<py::gil_scoped_release>;  // of whatever may wait

// A guard that ends when it is told to, for `with` and `finally`.
template <typename Guard>
class Entered {
 public:
  template <typename... Arguments>
  explicit Entered(Arguments&... arguments) {
    guard_.emplace(arguments...);
  }
  void end() { guard_.reset(); }

 private:
  std::optional<Guard> guard_;
};

using EnteredOffload = Entered<OffloadGuard>;
using EnteredNoOp = Entered<NoOpGuard>;
using EnteredUnseen = Entered<OperationLog::Unseen>;

py::list take_trace(Offloader& offloader) {
  using Us = std::chrono::duration<double, std::micro>;
  std::vector<TraceSpan> spans;
  {
    const py::gil_scoped_release released;
    spans = offloader.take_trace();
  }
  py::list result;
  for (const TraceSpan& span : spans) {
    result.append(py::make_tuple(span.name, static_cast<int>(span.track), Us(span.begin.time_since_epoch()).count(),
                                 Us(span.end.time_since_epoch()).count(), span.bytes, span.thread));
  }
  return result;
}

}  // namespace

void bind_offloader(py::module_& module) {
  py::class_<Offloader, std::unique_ptr<Offloader, DeleteWithoutGil>>(module, "Offloader")
      .def(py::init([](const Options& options) {
             const py::gil_scoped_release released;  // it measures the link
             return std::unique_ptr<Offloader, DeleteWithoutGil>(new Offloader(options));
           }),
           py::arg("options"))
      .def(
          "exclude", [](Offloader& offloader, const at::Tensor& tensor) { offloader.exclude(tensor); },
          py::arg("tensor"), Released())
      .def(
          "manage",
          [](Offloader& offloader, const std::vector<at::Tensor>& tensors, std::optional<std::uint64_t> device_bytes,
             std::optional<std::uint64_t> prefetch_bytes, std::uint64_t minimum_bytes, std::uint64_t resident_bytes,
             bool weights, bool gradients, bool states) {
            Parameters how;
            how.device_bytes = device_bytes;
            how.prefetch_bytes = prefetch_bytes;
            how.minimum_bytes = minimum_bytes;
            how.resident_bytes = resident_bytes;
            how.weights = weights;
            how.gradients = gradients;
            how.states = states;
            offloader.manage(tensors, how);
            return std::ranges::any_of(tensors, is_managed);  // none where all are too small
          },
          py::arg("tensors"), py::arg("device_bytes"), py::arg("prefetch_bytes"), py::arg("minimum_bytes"),
          py::arg("resident_bytes"), py::arg("weights"), py::arg("gradients"), py::arg("states"), Released())
      .def("parameters_may_be_sharded", &Offloader::parameters_may_be_sharded)
      .def(
          "release", [](Offloader& offloader, const std::vector<at::Tensor>& tensors) { offloader.release(tensors); },
          py::arg("tensors"), Released())
      .def("device", [](const Offloader& offloader) { return offloader.device().str(); })
      .def("drain", &Offloader::drain, Released())
      .def("evict", &Offloader::evict, py::arg("bytes"), Released())
      .def("stats", &Offloader::stats, Released())
      .def("summary", &Offloader::summary, Released())
      .def("explain", &Offloader::explain, Released())
      .def("plan_report", &Offloader::plan_report, Released())
      .def("reset_stats", &Offloader::reset_stats, Released())
      .def("take_timeline", &Offloader::take_timeline, Released())
      .def("take_trace", &take_trace);

  module.def("manage_beside", &manage_beside, py::arg("parameter"), py::arg("state"), Released());
  module.def("bytes_of", &bytes_of, py::arg("storage"), Released());
  module.def("let_addresses_be_read", &let_addresses_be_read, py::arg("let"), Released());
  py::class_<OptimizerStep, std::unique_ptr<OptimizerStep, DeleteWithoutGil>>(module, "OptimizerStep")
      .def(py::init<std::vector<at::Tensor>>(), py::arg("parameters"), Released());

  py::class_<EnteredOffload, std::unique_ptr<EnteredOffload, DeleteWithoutGil>>(module, "OffloadGuard")
      .def(py::init<Offloader&>(), py::arg("offloader"), py::keep_alive<1, 2>())
      .def("end", &EnteredOffload::end, Released());
  py::class_<EnteredNoOp, std::unique_ptr<EnteredNoOp, DeleteWithoutGil>>(module, "NoOpGuard")
      .def(py::init<>())
      .def("end", &EnteredNoOp::end, Released());
  py::class_<EnteredUnseen>(module, "Unseen").def(py::init<>()).def("end", &EnteredUnseen::end);
}

}  // namespace ebb::python

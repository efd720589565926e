#include "offload/options.h"

#include <cstdint>
#include <string>

#include <pybind11/stl.h>
#include <pybind11/stl/filesystem.h>

#include "python/src/bind.h"

namespace ebb::python {

void bind_options(py::module_& module) {
  py::enum_<Home>(module, "Home").value("auto", Home::kAuto).value("host", Home::kHost).value("disk", Home::kDisk);
  py::enum_<HostMemory>(module, "HostMemory")
      .value("pinned", HostMemory::kPinned)
      .value("pageable", HostMemory::kPageable);
  py::enum_<DiskIo>(module, "DiskIo")
      .value("auto", DiskIo::kAuto)
      .value("uring", DiskIo::kUring)
      .value("threads", DiskIo::kThreads);

  py::class_<Options>(module, "Options", "As ebb::Options (offload/options.h). Sizes are bytes.")
      .def(py::init<>())
      .def_readwrite("enabled", &Options::enabled)
      .def("set_device", [](Options& options, const std::string& device) { options.device = c10::Device(device); })
      .def_readwrite("policy", &Options::policy)
      .def("set_device_bytes",
           [](Options& options, std::uint64_t bytes) { options.device_budget = DeviceBytes{bytes}; })
      .def("set_share_of_free", [](Options& options, double share) { options.device_budget = ShareOfFree{share}; })
      .def("set_slowdown", [](Options& options, double fraction) { options.device_budget = Slowdown{fraction}; })
      .def("set_least_memory", [](Options& options) { options.device_budget = LeastMemory{}; })
      .def_readwrite("planned_minimum_bytes", &Options::planned_minimum_bytes)
      .def_readwrite("device_budget_is_a_wish", &Options::device_budget_is_a_wish)
      .def_readwrite("evict_when_out_of_memory", &Options::evict_when_out_of_memory)
      .def_readwrite("stash_bytes", &Options::stash_bytes)
      .def_readwrite("window_bytes", &Options::window_bytes)
      .def_readwrite("home", &Options::home)
      .def_readwrite("host_memory", &Options::host_memory)
      .def_readwrite("capacity_bytes", &Options::capacity_bytes)
      .def_readwrite("host_memory_warning", &Options::host_memory_warning)
      .def_readwrite("spill_folder", &Options::spill_folder)
      .def_readwrite("disk_io", &Options::disk_io)
      .def_readwrite("return_freed_memory", &Options::return_freed_memory)
      .def_readwrite("record_timeline", &Options::record_timeline)
      .def_readwrite("record_trace", &Options::record_trace);
}

}  // namespace ebb::python

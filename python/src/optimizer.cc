#include "offload/optimizer.h"

#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <pybind11/stl.h>

#include "offload/optimizer/parts.h"
#include "offload/optimizer/update_rule.h"
#include "offload/optimizer/updates.h"
#include "python/src/bind.h"
#include "python/src/gil.h"

namespace ebb::python {
namespace {

py::object power(const py::object& base, const py::object& exponent) {
  py::object made = py::reinterpret_steal<py::object>(PyNumber_Power(base.ptr(), exponent.ptr(), Py_None));
  if (made.ptr() == nullptr) {
    throw py::error_already_set();
  }
  return made;
}

// How an optimizer of Python's updates a parameter by the options of its group. An option may be a tensor of one
// element, or a number of NumPy's: then what torch.optim computes of it is rounded as such. Throws
// std::invalid_argument for what is no number.
class GroupOptions {
 public:
  GroupOptions(std::string kind, py::dict group) : kind_(std::move(kind)), group_(std::move(group)) {}

  [[nodiscard]] std::shared_ptr<UpdateRule> rule(double step) const {
    return kind_ == "SGD" ? sgd() : adam(/*is_decoupled=*/kind_ == "AdamW", step);
  }

 private:
  [[nodiscard]] std::shared_ptr<UpdateRule> sgd() const {
    return sgd_rule({.lr = number("lr"),
                     .momentum = number("momentum"),
                     .dampening = number("dampening"),
                     .weight_decay = number("weight_decay"),
                     .nesterov = flag("nesterov"),
                     .maximize = flag("maximize")});
  }

  [[nodiscard]] std::shared_ptr<UpdateRule> adam(bool is_decoupled, double step) const {
    const py::object betas = group_["betas"];
    if (!(py::isinstance<py::tuple>(betas) || py::isinstance<py::list>(betas)) || py::len(betas) != 2) {
      refuse("betas", betas, "two numbers in [0, 1)");
    }
    const py::object lr = group_["lr"];
    const py::object weight_decay = group_["weight_decay"];
    const py::object beta1 = betas[py::int_(0)];
    const py::object beta2 = betas[py::int_(1)];
    if (as_number("betas", beta1) == 1) {  // the size of a step would be divided by zero
      refuse("betas", betas, "two numbers in [0, 1)");
    }
    const py::int_ one(1);
    const py::float_ steps(step);
    return adam_rule({.language = Language::kPython,
                      .is_decoupled = is_decoupled,
                      .lr = as_number("lr", lr),
                      .beta1 = as_number("betas", beta1),
                      .beta2 = as_number("betas", beta2),
                      .eps = number("eps"),
                      .weight_decay = as_number("weight_decay", weight_decay),
                      .amsgrad = flag("amsgrad"),
                      .maximize = flag("maximize"),
                      .step = step,
                      .kept = as_number("lr", one - lr * weight_decay),
                      .weight1 = as_number("betas", one - beta1),
                      .weight2 = as_number("betas", one - beta2),
                      .step_size = as_number("lr", lr / (one - power(beta1, steps))),
                      .correction2 = as_number("betas", power(one - power(beta2, steps), py::float_(0.5)))});
  }

  [[nodiscard]] bool flag(const char* name) const { return py::bool_(group_[name]); }
  [[nodiscard]] double number(const char* name) const { return as_number(name, group_[name]); }

  [[nodiscard]] double as_number(const char* name, const py::object& value) const {
    if (!py::isinstance<py::bool_>(value)) {
      const double number = PyFloat_AsDouble(value.ptr());
      if (PyErr_Occurred() == nullptr) {
        return number;
      }
      PyErr_Clear();
    }
    refuse(name, value, "a number");
  }

  [[noreturn]] void refuse(const char* name, const py::object& value, const char* wanted) const {
    throw std::invalid_argument("ebb: " + kind_ + " got " + name + "=" + std::string(py::repr(value)) + ", and takes " +
                                wanted);
  }

  const std::string kind_;
  const py::dict group_;
};

// Throws std::invalid_argument where the value is none of the names.
template <typename Kind>
Kind choice(const std::string& of, const py::object& value, const std::vector<std::pair<std::string, Kind>>& known) {
  std::string names;
  for (const auto& [name, kind] : known) {
    if (value.equal(py::str(name))) {
      return kind;
    }
    names += (names.empty() ? "\"" : " or \"") + name + "\"";
  }
  throw std::invalid_argument("ebb: " + of + " is " + std::string(py::repr(value)) + ", and must be " + names);
}

// Returns the parts with all states that the update takes.
std::vector<Part> update(Updates& updates, const at::Tensor& parameter, std::vector<Part> parts,
                         const std::shared_ptr<UpdateRule>& rule, bool in_backward) {
  updates.update(parameter, parts, rule, in_backward ? Updates::Called::kInBackward : Updates::Called::kInStep);
  return parts;
}

}  // namespace

void bind_optimizer(py::module_& module) {
  using Released = py::call_guard<py::gil_scoped_release>;
  module.attr("ELEMENTS_AT_ONCE") = kElementsAtOnce;
  module.def("place_states", &place_states, py::arg("parameter"), py::arg("whole"), py::arg("elements_at_once"),
             Released());
  py::class_<UpdateRule, std::shared_ptr<UpdateRule>>(module, "UpdateRule").def("check", &UpdateRule::check);
  module.def(
      "rule_of",
      [](std::string kind, py::dict group, double step) {
        return GroupOptions(std::move(kind), std::move(group)).rule(step);
      },
      py::arg("kind"), py::arg("group"), py::arg("step"));
  py::class_<Updates, std::unique_ptr<Updates, DeleteWithoutGil>>(module, "Updates")
      .def(py::init([](const py::object& update_in, const py::object& update_on, std::int64_t elements_at_once) {
             const auto when = choice<UpdateIn>(
                 "update_in", update_in,
                 {{"step", UpdateIn::kStep}, {"backward", UpdateIn::kBackward}, {"next_use", UpdateIn::kNextUse}});
             const auto where =
                 choice<UpdateOn>("update_on", update_on, {{"device", UpdateOn::kDevice}, {"cpu", UpdateOn::kCpu}});
             return std::unique_ptr<Updates, DeleteWithoutGil>(new Updates(when, where, elements_at_once));
           }),
           py::arg("update_in"), py::arg("update_on"), py::arg("elements_at_once"))
      .def("update", &update, py::arg("parameter"), py::arg("parts"), py::arg("rule"), py::arg("in_backward"),
           Released())
      .def("end_step", &Updates::end_step, Released())
      .def("end_thread", &Updates::end_thread, Released());  // Python calls it before the interpreter ends
}

}  // namespace ebb::python

#include "offload/optimizer.h"

#include <cstdint>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <pybind11/stl.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include "offload/optimizer/background_updates.h"
#include "offload/optimizer/part_update.h"
#include "offload/optimizer/parts.h"
#include "offload/optimizer/update_rule.h"
#include "python/src/bind.h"
#include "python/src/gil.h"
#include "streams/base/mutex.h"
#include "streams/base/process_mark.h"

namespace ebb::python {
namespace {

using Numbers = std::map<std::string, double>;

template <typename Options>
Options with_moments(const Numbers& given) {
  return Options(given.at("lr"))
      .betas({given.at("beta1"), given.at("beta2")})
      .eps(given.at("eps"))
      .weight_decay(given.at("weight_decay"))
      .amsgrad(given.at("amsgrad") != 0);
}

torch::optim::SGDOptions with_momentum(const Numbers& given) {
  return torch::optim::SGDOptions(given.at("lr"))
      .momentum(given.at("momentum"))
      .dampening(given.at("dampening"))
      .weight_decay(given.at("weight_decay"))
      .nesterov(given.at("nesterov") != 0);
}

// How an optimizer of Python's updates a parameter once.
class CpuUpdate {
 public:
  // `kind`: "AdamW", "Adam" or "SGD". `numbers`: the options of LibTorch's class of that name; booleans as 0 and 1.
  CpuUpdate(const std::string& kind, const Numbers& numbers, std::int64_t step, bool has_new_states)
      : step_(step), has_new_states_(has_new_states) {
    if (kind == "AdamW") {
      set(with_moments<torch::optim::AdamWOptions>(numbers));
    } else if (kind == "Adam") {
      set(with_moments<torch::optim::AdamOptions>(numbers));
    } else if (kind == "SGD") {
      set(with_momentum(numbers));
    } else {
      throw std::invalid_argument("ebb: no optimizer is called " + kind);
    }
  }

  [[nodiscard]] Update get() const { return {*rule_, options_, step_, has_new_states_}; }

 private:
  template <typename Options>
  void set(Options options) {
    rule_ = &rule_of<Options>();
    options_ = std::make_shared<Options>(std::move(options));
  }

  const std::int64_t step_;
  const bool has_new_states_;
  const UpdateRule* rule_ = nullptr;
  std::shared_ptr<const torch::optim::OptimizerOptions> options_;
};

// Updates on the CPU, of one optimizer. end() joins the thread that does them: Python calls it before the interpreter
// ends.
class CpuUpdates {
 public:
  static void now(const at::Tensor& parameter, const at::Tensor& gradient, const std::vector<Part>& parts,
                  const CpuUpdate& update) {
    update_now(parameter, gradient, parts, update.get(), UpdateOn::kCpu, /*follows_weight=*/true);
  }

  // Returns false, and has done nothing, where the update cannot be put off.
  bool later(const at::Tensor& parameter, const at::Tensor& gradient, const std::vector<Part>& parts,
             const CpuUpdate& update) {
    const std::shared_ptr<BackgroundUpdates> background = this->background();
    return background != nullptr && background->update_later(parameter, gradient, parts, update.get());
  }

  void end() {
    std::shared_ptr<BackgroundUpdates> ended;  // destroyed after the lock is released
    const MutexLock lock(mutex_);
    ended = std::move(background_);
  }

 private:
  std::shared_ptr<BackgroundUpdates> background() {
    const MutexLock lock(mutex_);
    return background_;
  }

  Mutex mutex_;
  std::shared_ptr<BackgroundUpdates> background_ EBB_GUARDED_BY(mutex_) =
      make_shared_unless_forked<BackgroundUpdates>();
};

}  // namespace

void bind_optimizer(py::module_& module) {
  using Released = py::call_guard<py::gil_scoped_release>;
  module.attr("ELEMENTS_AT_ONCE") = kElementsAtOnce;
  py::class_<CpuUpdate>(module, "CpuUpdate")
      .def(py::init<const std::string&, const Numbers&, std::int64_t, bool>(), py::arg("kind"), py::arg("numbers"),
           py::arg("step"), py::arg("has_new_states"));
  py::class_<CpuUpdates, std::unique_ptr<CpuUpdates, DeleteWithoutGil>>(module, "CpuUpdates")
      .def(py::init<>())
      .def_static("now", &CpuUpdates::now, py::arg("parameter"), py::arg("gradient"), py::arg("parts"),
                  py::arg("update"), Released())
      .def("later", &CpuUpdates::later, py::arg("parameter"), py::arg("gradient"), py::arg("parts"), py::arg("update"),
           Released())
      .def("end", &CpuUpdates::end, Released());
}

}  // namespace ebb::python

#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/optimizer.h>
#include <torch/optim/sgd.h>

namespace ebb {

class UpdateRule;

// When an optimizer updates parameters.
enum class UpdateIn : std::uint8_t {
  kStep,  // in step()

  // In backward, each parameter as soon as its gradient is whole. The gradient is then let go of, so that no more than
  // a few gradients are alive at once. One backward pass is one step: there is no accumulation over micro-batches. Nor
  // is there clipping by the norm of all gradients: clip_grad_norm_() finds no gradient afterwards, and clips nothing.
  // A parameter's second gradient before step() or zero_grad() is a c10::Error, thrown by backward, and the gradient
  // stays. A backward pass inside of another (a reentrant checkpoint) has a part of a gradient: do not use the two
  // together. step() updates what still has a gradient, and so does nothing for a second optimizer of the same
  // parameter. Two readers see an updated weight too early, and cannot tell. One is the backward of a weight that
  // shares the memory by other means than a view (set_data). The other is a checkpointed part of the model that reads
  // the weight without its gradient (weight.detach()), and runs again after the update.
  kBackward,

  // At the next use of the parameter, its gradient or one of its states, on whatever thread, if Offloader::manage has
  // been given all of them; otherwise in step(). The next use is mostly in the next forward pass, which computes while
  // states come and go. The update runs on the stream of step(), which must still be there, and every use is ordered
  // behind the update. So a program reads what kStep gives. The differences are:
  // - A gradient that the program lets go of lives until the update.
  // - An error in an update comes from the use. Where the device has no memory for the parameter and its gradient,
  //   nothing has been updated, and the next use tries again.
  // - A profiler, or a mode that is active around step(), does not see the update there.
  // - Weight decay may be part of the states (Adam, SGD). If the program then lets go of the parameter and keeps a
  //   state, each use of the state or the gradient is a c10::Error.
  kNextUse,
};

// Which processor updates parameters.
enum class UpdateOn : std::uint8_t {
  // The parameter's device, to which the states come.
  kDevice,

  // The CPU, where parameters, gradients and states have their homes in host memory: gradients go there, weights come
  // back, and states stay. On a GPU, with UpdateIn::kBackward or kNextUse, a thread updates beside whatever the GPU
  // does. An error in an update then comes from the parameter's next use. A gradient that is not managed, as in
  // backward, is copied. The copy is managed until its update is done, and on the device counts within
  // Parameters::device_bytes. At most 2 GiB of an optimizer's copies, or one copy that is larger, wait for their
  // updates.
  //
  // LibTorch's fused kernels are used, which round differently. After one step from the same state, a weight in float32
  // differs from kDevice's by at most 8 units in the last place. The unit is that of the largest of three values: the
  // weight before the step, the weight after the step, and the learning rate. (Measured on x86, over a million
  // elements: 4 with AdamW and Adam, 0 with SGD.)
  //
  // The device updates parameters that have ended but for their states. It also updates those with a tensor that is not
  // at home: resident, refused by a full host, or just then in use or fetched by another thread. The same holds for
  // tensors that the kernels do not take: not contiguous, negated, complex, or a gradient in the memory of the
  // parameter or a state. On a CPU this is a choice of kernels alone.
  kCpu,
};

// What an optimizer knows of one parameter.
struct OptimizerState final : torch::optim::OptimizerCloneableParamState<OptimizerState> {
  std::int64_t step = 0;  // how many updates there have been

  // By name, as LibTorch's optimizer calls them ("exp_avg", "momentum_buffer"), and "master": the parameter in float32,
  // of one in bfloat16 or half. Each element of the vector has some rows of the parameter, its elements with these
  // indices in the first dimension, and they follow one another. One element, unless the parameter is large.
  std::vector<std::map<std::string, at::Tensor>> parts;

  // As an archive has it, and not beside the parameter yet: one part, of all rows.
  bool is_whole = false;

  // An archive has each tensor whole.
  void serialize(torch::serialize::InputArchive& archive) override;
  void serialize(torch::serialize::OutputArchive& archive) const override;
};

// An optimizer whose states are where its parameters are. AdamW, Adam and SGD, below, say how parameters are updated.
//
// Parameters in float32 and double get the bits of LibTorch's optimizer, because the same operations run in the same
// order. Parameters in bfloat16 and half have a master in float32, which is updated by the gradient in float32, and
// then rounded to the parameter.
//
// States and masters of parameters that Offloader::manage has been given are managed in the same set. They are on the
// device around their uses only. Other parameters' states stay beside them. Parameters of more than 16 million elements
// are updated in parts of so many elements, or of one row. Their states are in such parts, too, and each part comes and
// goes by itself.
//
// A weight that the program writes, by whatever means, counts: each update first takes the weight's value wherever the
// master does not round to it. So weights may be loaded before the states, or after them. Parameters of groups that are
// added later are updated in step().
//
// Learning-rate schedulers, parameter groups and the norm's clipping are those of LibTorch. An archive of save() has
// copies of all states in host memory until it is written.
//
// Threads: one at a time. With UpdateIn::kBackward, backward passes count, and the optimizer must not end during one.
// Errors: std::invalid_argument for options out of their range, and for options of another optimizer where LibTorch
// does not replace them by the defaults (newer versions do). c10::Error for gradients that are not dense, and for an
// archive with another optimizer's options, or with states of other sizes. Where the device's memory does not suffice,
// step() throws c10::OutOfMemoryError with some parameters updated and others not: go on from what was saved.
class Optimizer : public torch::optim::Optimizer {
 public:
  ~Optimizer() override;
  Optimizer(Optimizer&&) = delete;
  Optimizer& operator=(Optimizer&&) = delete;
  Optimizer(const Optimizer&) = delete;
  Optimizer& operator=(const Optimizer&) = delete;

  // Updates every parameter that has a gradient. Returns what `closure` returns, which is called first, with gradients.
  at::Tensor step(LossClosure closure = nullptr) override;

  // As LibTorch's. Call it by this class, whose step it ends with UpdateIn::kBackward.
  void zero_grad(bool set_to_none = true);

 protected:
  // How LibTorch's options update a parameter. `step`: from 1. Throws std::invalid_argument for another optimizer's.
  using RuleOf = std::shared_ptr<UpdateRule> (*)(const torch::optim::OptimizerOptions& options, std::int64_t step);

  Optimizer(RuleOf rule_of, const std::vector<torch::optim::OptimizerParamGroup>& groups,
            std::unique_ptr<torch::optim::OptimizerOptions> defaults, UpdateIn update_in, UpdateOn update_on);

  // Has `read` read an archive, and puts every state that has been read beside its parameter. Where that throws,
  // options and states have the values that they had, in new objects.
  void load_by(const std::function<void()>& read);

 private:
  struct Shared;  // what backward passes of several threads use

  void check_options() const;
  void place_loaded_states();
  void update(const at::Tensor& parameter, const torch::optim::OptimizerOptions& options, bool in_backward);
  [[nodiscard]] const torch::optim::OptimizerOptions* options_of(const at::Tensor& parameter, std::size_t place) const;
  OptimizerState& state_of(const at::Tensor& parameter);

  const RuleOf rule_of_;
  const std::unique_ptr<Shared> shared_;
};

// `Options`: those of LibTorch's optimizer of the same name.
template <typename Options>
class OptimizerWith final : public Optimizer {
 public:
  explicit OptimizerWith(const std::vector<torch::optim::OptimizerParamGroup>& groups, Options defaults = {},
                         UpdateIn update_in = UpdateIn::kStep, UpdateOn update_on = UpdateOn::kDevice);
  explicit OptimizerWith(std::vector<at::Tensor> parameters, Options defaults = {},
                         UpdateIn update_in = UpdateIn::kStep, UpdateOn update_on = UpdateOn::kDevice);

  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;
};

// Loshchilov, Hutter: Decoupled Weight Decay Regularization, 2019.
using AdamW = OptimizerWith<torch::optim::AdamWOptions>;

// Kingma, Ba: Adam: A Method for Stochastic Optimization, 2015. With amsgrad: Reddi, Kale, Kumar: On the Convergence of
// Adam and Beyond, 2018.
using Adam = OptimizerWith<torch::optim::AdamOptions>;

// Stochastic gradient descent, with momentum as in Sutskever and others: On the importance of initialization and
// momentum in deep learning, 2013. Without momentum only masters are kept.
using SGD = OptimizerWith<torch::optim::SGDOptions>;

}  // namespace ebb

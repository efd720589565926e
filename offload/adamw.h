#pragma once

#include <cstdint>
#include <memory>
#include <unordered_set>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/optim/adamw.h>
#include <torch/optim/optimizer.h>

#include "streams/base/mutex.h"

namespace ebb {

// When an optimizer updates parameters.
enum class UpdateIn : std::uint8_t {
  kStep,  // in step()

  // In backward, each parameter as soon as its gradient is whole, which is then let go of: no more than a few gradients
  // are alive at once. One backward pass is one step, so there is no accumulation over micro-batches and no clipping by
  // the norm of all gradients: a parameter's second gradient before step() or zero_grad() is a c10::Error, thrown by
  // backward, and the gradient stays. A backward pass inside of another (a reentrant checkpoint) has a part of a
  // gradient: do not use the two together. step() updates what still has a gradient.
  kBackward,

  // In step(), or for parameters that Offloader::manage has been given, with their gradients and states, when one of
  // these is used next, on whatever thread: mostly in the next forward pass, which computes while states come and go.
  // The update runs on the stream of step(), which must still be there, and every use is ordered behind the update. So
  // what a program reads is what kStep gives, and the differences are: a gradient that the program lets go of lives
  // until the update; an error in an update comes from the use (where the device has no memory for the parameter and
  // its gradient, nothing has been updated, and the next use tries again); a profiler, or a mode that is active around
  // step(), does not see the update there.
  kNextUse,
};

// What the optimizer knows of some rows of a parameter: its elements with these indices in the first dimension.
struct AdamWRows {
  at::Tensor exp_avg;
  at::Tensor exp_avg_sq;
  at::Tensor max_exp_avg_sq;  // with amsgrad
  at::Tensor master;          // of a parameter in bfloat16 or half: the rows in float32
};

// What the optimizer knows of one parameter.
struct AdamWState final : torch::optim::OptimizerCloneableParamState<AdamWState> {
  std::int64_t step = 0;
  std::vector<AdamWRows> parts;  // that follow one another; one part, unless the parameter is large

  // An archive has each state whole.
  void serialize(torch::serialize::InputArchive& archive) override;
  void serialize(torch::serialize::OutputArchive& archive) const override;
};

// AdamW (Loshchilov, Hutter: Decoupled Weight Decay Regularization, 2019). Parameters in float32 and double get the
// bits of torch::optim::AdamW, because the same operations run in the same order. Parameters in bfloat16 and half have
// a master in float32, which is updated by the gradient in float32, and then rounded to the parameter.
//
// States and masters of parameters that Offloader::manage has been given are managed in the same set, and so are on the
// device around their uses only. Other parameters' states stay beside them. Parameters of more than 16 million elements
// are updated in parts of so many, or of one row, and have their states in such parts, each of which comes and goes by
// itself.
//
// A weight that the program writes after the first step is overwritten by its master: load weights before that, or with
// the states. Parameters of groups that are added later are updated in step().
//
// Learning-rate schedulers, parameter groups, zero_grad and the norm's clipping are those of LibTorch. An archive of
// save() has copies of all states in host memory until it is written.
//
// Threads: one at a time. With UpdateIn::kBackward, backward passes count, and the optimizer must not end during one.
// Errors: std::invalid_argument for options out of their range, c10::Error for sparse gradients. Where the device's
// memory does not suffice, step() throws c10::OutOfMemoryError with some parameters updated and others not: go on from
// what was saved.
class AdamW final : public torch::optim::Optimizer {
 public:
  explicit AdamW(const std::vector<torch::optim::OptimizerParamGroup>& groups, torch::optim::AdamWOptions defaults = {},
                 UpdateIn update = UpdateIn::kStep);
  explicit AdamW(std::vector<at::Tensor> parameters, torch::optim::AdamWOptions defaults = {},
                 UpdateIn update = UpdateIn::kStep);
  ~AdamW() override;
  AdamW(AdamW&&) = delete;
  AdamW& operator=(AdamW&&) = delete;
  AdamW(const AdamW&) = delete;
  AdamW& operator=(const AdamW&) = delete;

  // Updates every parameter that has a gradient. Returns what `closure` returns, which is called first, with gradients.
  at::Tensor step(LossClosure closure = nullptr) override;

  // As LibTorch's. Call it by this class, whose step it ends with UpdateIn::kBackward.
  void zero_grad(bool set_to_none = true);

  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;

 private:
  void update_in_backward(const at::Tensor& parameter);
  void update(const at::Tensor& parameter, const torch::optim::AdamWOptions& options);
  bool update_at_next_use(const at::Tensor& parameter, const torch::optim::AdamWOptions& options);
  AdamWState& state_of(const at::Tensor& parameter, const torch::optim::AdamWOptions& options);

  const UpdateIn update_in_;
  Mutex mutex_;  // of state_, too: leaves of several devices have their gradients on several threads
  std::unordered_set<const void*> updated_ EBB_GUARDED_BY(mutex_);  // in backward, since the last step()
  std::shared_ptr<AdamW*> self_;  // for hooks of the program's that wrap ours, and may outlive the optimizer
};

}  // namespace ebb

#include "examples/train/trainer.h"

#include <stdexcept>
#include <utility>

#include <ATen/ops/cross_entropy_loss.h>
#include <torch/nn/utils/clip_grad.h>

#include "examples/llama/llama.h"
#include "examples/train/batches.h"
#include "examples/train/checkpoint.h"
#include "examples/train/optimizer.h"
#include "examples/train/sample.h"
#include "offload/guard.h"
#include "offload/offloader.h"
#include "offload/optimizer_step.h"
#include "offload/parameters.h"

namespace ebb {
namespace {

constexpr double kLargestGradientNorm = 1.0;

at::TensorOptions tensor_options(const TrainOptions& options, c10::Device device) {
  return at::TensorOptions().device(device).dtype(options.dtype == "bfloat16" ? at::kBFloat16 : at::kFloat);
}

}  // namespace

struct Trainer::State {
  State(const TrainOptions& options, std::string_view text, c10::Device where)
      : device(where),
        seed(options.seed),
        dtype(options.dtype),
        batches(text, options.batch, options.seq, options.seed),
        schedule{options.learning_rate, options.warmup, options.steps},
        model(std::make_shared<Llama>(options.model, options.seq, options.seed, tensor_options(options, where))),
        optimizer(make_optimizer(model->parameters(), options.weight_decay)) {}

  c10::Device device;
  std::uint64_t seed;
  std::string dtype;
  Batches batches;
  Schedule schedule;
  std::shared_ptr<Llama> model;
  torch::optim::AdamW optimizer;
  std::int64_t first_step = 0;

  at::Tensor run(std::int64_t index, Offloader& offloader);
};

// The loss of one batch; its gradients are in the parameters.
at::Tensor Trainer::State::run(std::int64_t index, Offloader& offloader) {
  const auto batch = batches.at(index);
  const auto inputs = batch.inputs.to(device);
  const auto targets = batch.targets.to(device);
  optimizer.zero_grad();
  const OffloadGuard offloading(offloader);
  const auto hidden = model->forward_hidden(inputs);
  at::Tensor loss;
  {
    const NoOpGuard wanted_at_once;
    const auto logits = model->head(hidden).to(at::kFloat);
    loss = at::cross_entropy_loss(logits.flatten(0, 1), targets.flatten());
  }
  loss.backward();
  return loss.detach();
}

Trainer::Trainer(const TrainOptions& options, std::string_view text, c10::Device device)
    : state_(std::make_unique<State>(options, text, device)) {
  if (options.resume.empty()) {
    return;
  }
  state_->first_step = load_checkpoint(options.resume, *state_->model, state_->optimizer, options.dtype);
  if (state_->first_step >= options.until) {
    throw std::invalid_argument("nothing to train: the checkpoint " + options.resume.string() + " has done " +
                                std::to_string(state_->first_step) + " steps, and this run ends after " +
                                std::to_string(options.until));
  }
}

Trainer::~Trainer() = default;

void Trainer::manage(Offloader& offloader, const TrainOptions& options) {
  Parameters how;
  how.device_bytes = options.managed_bytes;
  how.minimum_bytes = options.minimum_bytes.value_or(kLeastManaged);
  how.weights = options.managed.has_value();
  how.gradients = how.weights;
  how.states = options.optimizer_home.has_value();
  offloader.manage(*state_->model, how);
  if (!how.states) {
    return;
  }
  how.weights = true;                                                 // the moments themselves
  for (const auto& [parameter, state] : state_->optimizer.state()) {  // of a checkpoint; others are made at home
    const auto& moments = static_cast<const torch::optim::AdamWParamState&>(*state);
    offloader.manage({moments.exp_avg(), moments.exp_avg_sq()}, how);
  }
}

float Trainer::step(std::int64_t index, Offloader& offloader) {
  const auto loss = state_->run(index, offloader);
  torch::nn::utils::clip_grad_norm_(state_->model->parameters(), kLargestGradientNorm);
  set_learning_rate(state_->optimizer, state_->schedule.at(index));
  const OptimizerStep makes_states(state_->optimizer);  // for states that live where their weights do
  state_->optimizer.step();
  return loss.item<float>();
}

float Trainer::forward_backward(std::int64_t index, Offloader& offloader) {
  return state_->run(index, offloader).item<float>();
}

std::int64_t Trainer::first_step() const { return state_->first_step; }

void Trainer::save(const std::filesystem::path& file, std::int64_t steps_done) const {
  save_checkpoint(file, *state_->model, state_->optimizer, state_->dtype, steps_done);
}

std::string Trainer::sample(const std::string& prompt, std::int64_t bytes) {
  return sample_text(*state_->model, prompt, bytes, state_->seed, state_->device);
}

Llama& Trainer::model() { return *state_->model; }

}  // namespace ebb

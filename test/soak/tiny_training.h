#pragma once

#include <cstdint>
#include <memory>
#include <random>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <torch/optim/sgd.h>

#include "offload/offloader.h"

namespace ebb {

// What one step does beside forward, backward and update.
enum class StepKind : std::uint8_t {
  kInside,    // backward under the guard
  kOutside,   // backward after the guard
  kRetained,  // two backward passes over one graph
  kDouble,    // a backward pass that is differentiated
  kTwo,       // two graphs alive at once, run backward in the order of their making
  kDropped,   // a graph that is never run backward
  kThrown,    // an exception in the middle of forward
};
inline constexpr int kStepKinds = 7;

// Training of a model so small that a step takes about a millisecond, with sizes and placement of saves drawn anew for
// each step. One Offloader serves the whole run.
class TinyTraining {
 public:
  // `managed`: the offloader manages the weights and their gradients, and one of them at a time is on the device.
  TinyTraining(c10::Device device, std::uint64_t seed, bool managed);

  // The next step: the kinds take turns. Afterwards no graph and no gradient is alive.
  // With `compare`, returns whether its gradients are those of plain autograd, bit for bit.
  bool step(bool compare);

  Offloader& offloader() { return offloader_; }

 private:
  // What the policy goes by; drawn anew for each step.
  struct Draw {
    std::uint64_t salt = 0;
    unsigned kept_of_eight = 0;
  };

  [[nodiscard]] static Options options(c10::Device device, std::shared_ptr<Draw> draw);
  [[nodiscard]] at::Tensor input();
  [[nodiscard]] at::Tensor loss(const at::Tensor& input) const;
  [[nodiscard]] bool run(StepKind kind, const at::Tensor& x, const at::Tensor& y, Offloader* offloader) const;
  [[nodiscard]] std::vector<at::Tensor> gradients() const;

  const c10::Device device_;
  std::mt19937_64 random_;
  const std::shared_ptr<Draw> draw_ = std::make_shared<Draw>();
  Offloader offloader_;
  std::vector<at::Tensor> weights_;
  torch::optim::SGD optimizer_;
  std::uint64_t steps_ = 0;
};

}  // namespace ebb

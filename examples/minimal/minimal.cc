// The least that a training loop needs to use ebb: an Offloader, a guard around each step, and a guard around the head.
#include <cstdio>

#include <torch/torch.h>

#include "offload/guard.h"
#include "offload/offloader.h"

int main() {
  torch::manual_seed(1);
  const auto device = torch::cuda::is_available() ? torch::kCUDA : torch::kCPU;
  torch::nn::Sequential body(torch::nn::Linear(64, 1024), torch::nn::SiLU());
  for (int layer = 0; layer < 8; ++layer) {
    body->push_back(torch::nn::Linear(1024, 1024));
    body->push_back(torch::nn::SiLU());
  }
  torch::nn::Linear head(1024, 1);
  body->to(device);
  head->to(device);
  auto parameters = body->parameters();
  parameters.insert(parameters.end(), {head->weight, head->bias});
  torch::optim::AdamW optimizer(parameters, torch::optim::AdamWOptions(1e-3));

  ebb::Offloader offloader;  // lives as long as the run; ebb::Options says what it may do
  for (int step = 0; step < 5; ++step) {
    const auto x = torch::randn({1024, 64}, device);
    optimizer.zero_grad();
    ebb::OffloadGuard guard(offloader);  // what autograd saves from here on leaves the device
    const auto hidden = body->forward(x);
    torch::Tensor loss;
    {
      ebb::NoOpGuard head_guard;  // what backward wants at once stays
      loss = torch::mse_loss(head(hidden), x.sum(1, /*keepdim=*/true));
    }
    loss.backward();
    optimizer.step();
    std::printf("step %d  loss %.4f  offloaded %.1f MB\n", step + 1, loss.item<float>(),
                static_cast<double>(offloader.stats().offloaded.bytes) / 1e6);
  }
}

// Trains a step with ebb and a step without, from the same seed: prints "equal" if the gradients are and something
// moved.
#include <cstdio>
#include <filesystem>
#include <vector>

#include <torch/torch.h>

#include "offload/guard.h"
#include "offload/offloader.h"

namespace {

std::vector<torch::Tensor> gradients(ebb::Offloader* offloader) {
  torch::manual_seed(1);
  torch::nn::Sequential body(torch::nn::Linear(64, 1024), torch::nn::SiLU(), torch::nn::Linear(1024, 1024),
                             torch::nn::SiLU());
  torch::nn::Linear head(1024, 1);
  const auto x = torch::randn({1024, 64});
  torch::Tensor hidden;
  if (offloader != nullptr) {
    const ebb::OffloadGuard guard(*offloader);
    hidden = body->forward(x);
  } else {
    hidden = body->forward(x);
  }
  torch::mse_loss(head(hidden), x.sum(1, /*keepdim=*/true)).backward();
  std::vector<torch::Tensor> all;
  for (const auto& parameter : body->parameters()) {
    all.push_back(parameter.grad());
  }
  return all;
}

}  // namespace

int main() {
  // Jumps to address 0 where LibTorch's copy of std::filesystem is found before the standard library's.
  const auto folder = std::filesystem::temp_directory_path() / "ebb-consumer";
  std::filesystem::create_directories(folder / "inner");
  std::filesystem::remove_all(folder);

  ebb::Options options;
  options.device = torch::kCPU;
  ebb::Offloader offloader(options);
  const auto with = gradients(&offloader);
  const auto without = gradients(nullptr);
  bool equal = offloader.stats().offloaded.tensors > 0 && !std::filesystem::exists(folder);
  for (std::size_t i = 0; i < with.size(); ++i) {
    equal = equal && torch::equal(with[i], without[i]);
  }
  std::printf("%s: %.1f MB moved\n", equal ? "equal" : "DIFFERENT",
              static_cast<double>(offloader.stats().offloaded.bytes) / 1e6);
  return equal ? 0 : 1;
}

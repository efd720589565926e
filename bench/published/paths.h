#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

namespace ebb {

class DeviceMemory;
class Offloader;

// The function of lightning-thunder's issue 1337 as a training step: n times
//
//   t1 = relu(t0), t2 = t1 t1, t3 = relu(t2), a = t3 a
//
// over float32 matrices of 256 by 256, each t0 another matrix. The issue measures the function itself, which stands
// there for a backward with checkpoints: make t3 anew from t0, multiply the gradient of `a` by t3, and forget both. The
// function takes 0.75 MiB above the memory at its beginning, whatever n. Here the function is the forward pass, and
// backward is to take no more: the gradient that a path is given, and two tensors more. Only `a` is trained, so
// gradients do not grow with n either.
struct PathsCase {
  std::string name;
  bool summed = false;  // the paths lie side by side, all from the same `a`, and their results are added

  // silu in relu's place, and t0 is one trained matrix for all paths. Autograd saves relu's result and nothing
  // to compute it from, so relu has no recipe and silu has one. The memory of a path's derivative comes on top, as
  // plain autograd shows.
  bool trained = false;
};

// "chain" is the function; "sum" and "trained" have the paths side by side.
PathsCase paths_case(const std::string& name);

// "none", "checkpoint" (ebb::checkpoint around each path), and, where there are recipes, "recipes" (all that can be
// recomputed is, at any cost).
std::vector<std::string> paths_configs(const PathsCase& paths_case);

class Paths {
 public:
  // Inputs come from a fixed seed.
  Paths(const PathsCase& paths_case, int n, c10::Device device);

  struct Memory {
    std::uint64_t held_bytes = 0;             // by the graph when backward begins
    std::uint64_t peak_over_start_bytes = 0;  // in backward, above all that was there when it began
    std::uint64_t recomputed_bytes = 0;       // by recipes
  };

  // Measures a step after a first that does not count: LibTorch's libraries take memory of their own once. `memory`
  // must have been made before this object.
  [[nodiscard]] Memory measure(const std::string& config, DeviceMemory& memory) const;

  // Whether the gradients are those of plain autograd, bit for bit, in two steps.
  [[nodiscard]] bool gradients_equal(const std::string& config) const;

 private:
  [[nodiscard]] at::Tensor forward(bool checkpointed) const;
  [[nodiscard]] std::vector<at::Tensor> backward(const at::Tensor& result) const;
  [[nodiscard]] std::vector<at::Tensor> trained() const;

  const PathsCase case_;
  const c10::Device device_;
  std::vector<at::Tensor> starts_;
  at::Tensor a_;
  at::Tensor gradient_;  // of the result
};

}  // namespace ebb

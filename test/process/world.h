#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include "offload/offloader.h"
#include "offload/options.h"

namespace ebb {

inline constexpr std::int64_t kSmall = 256;                    // floats
inline constexpr std::int64_t kLarge = std::int64_t{2} << 20;  // 8 MiB: its copies take a while

// Everything moves.
[[nodiscard]] Options everything(c10::Device device);

// The loss of a small graph.
[[nodiscard]] at::Tensor forward(const at::Tensor& leaf);

// An offloader and a graph that was made under its guard.
struct World {
  explicit World(std::int64_t floats, c10::Device device = at::kCPU);

  void build();                          // another graph
  void drop();                           // graph and offloader
  [[nodiscard]] std::string backward();  // "exact" or "wrong"

  std::unique_ptr<Offloader> offloader;
  at::Tensor leaf;
  at::Tensor loss;
  at::Tensor expected;
};

// Prints a line, at once.
void say(const std::string& line);

// What `act` throws; "nothing" if nothing.
[[nodiscard]] std::string error_of(const std::function<void()>& act);

}  // namespace ebb

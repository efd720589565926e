#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <string>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include "offload/offloader.h"

namespace ebb {

// What lives on while steps come and go.
enum class Held : std::uint8_t {
  kOneSave,     // one graph, beside forward passes that are dropped
  kManyGraphs,  // graphs that have gone backward, by the thousand, the oldest released first
  kOneGraph,    // one graph that is derived again and again, with create_graph
};

// Their names on the command line.
[[nodiscard]] const std::map<std::string, Held>& held_names();

// Steps so small that what ebb notes of them outweighs their tensors, beside something that is held. Nothing that a
// step leaves may stay for as long as that.
class HeldGraphs {
 public:
  struct Choices {
    Held held = Held::kOneSave;
    bool budget = false;  // planned, instead of all moving
    bool plain = false;   // without ebb: LibTorch itself must be flat
  };

  HeldGraphs(c10::Device device, const Choices& choices);

  void step();

  // Lets go of all that is held. Returns whether ebb then holds nothing, and what was held is still what it was.
  [[nodiscard]] bool release();

  Offloader& offloader() { return offloader_; }

 private:
  [[nodiscard]] at::Tensor forward(const at::Tensor& x) const;
  void drop_one() const;
  void add_one();
  void derive_again() const;

  const Choices choices_;
  mutable Offloader offloader_;
  const at::Tensor weight_;
  const at::Tensor input_;
  const at::Tensor expected_;  // the gradient, by plain autograd
  std::deque<at::Tensor> held_;
  std::uint64_t steps_ = 0;
};

}  // namespace ebb

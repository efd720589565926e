#include "offload/base/autograd_info.h"

#include <utility>
#include <vector>

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <catch2/catch.hpp>
#include <torch/csrc/autograd/function.h>

namespace ebb {
namespace {

// Tensors of every kind that LibTorch's answers differ for.
std::vector<std::pair<const char*, at::Tensor>> tensors() {
  const at::Tensor leaf = at::ones({4}).requires_grad_();
  const at::Tensor base = at::ones({4});
  const at::Tensor before_the_write = base.view({2, 2});
  base.mul_(leaf);
  const at::Tensor made = leaf * 2;
  const at::Tensor written = made.view({2, 2});
  made.mul_(3);  // the view's node is now the write's
  at::Tensor view_without_gradients;
  {
    const at::NoGradGuard no_grad;
    view_without_gradients = made.view({2, 2});
  }
  return {
      {"a leaf without gradient", at::ones({4})},
      {"a leaf", leaf},
      {"an operation's output", leaf * 2},
      {"a second output", at::split(leaf * 2, 2)[1]},
      {"a view", (leaf * 2).view({2, 2})},
      {"a view of a leaf", leaf.view({2, 2})},
      {"a view of a leaf without gradient", at::ones({4}).view({2, 2})},
      {"a view that has been written to", written},
      {"a view whose base has its first node since", before_the_write},
      {"a view made without gradients", view_without_gradients},
      {"a detached view", made.view({2, 2}).detach()},
      {"an output's data", made.tensor_data()},
  };
}

TEST_CASE("what autograd knows of a tensor is what the tensor itself says") {
  for (const auto& [name, tensor] : tensors()) {
    CAPTURE(name);
    const AutogradInfo info(tensor);
    CHECK(info.is_leaf() == tensor.is_leaf());
    CHECK(info.is_view() == tensor.is_view());
    CHECK(info.requires_grad() == tensor.requires_grad());
    CHECK(info.output_nr() == tensor.output_nr());
    CHECK(info.grad_fn() == tensor.grad_fn());
  }
}

}  // namespace
}  // namespace ebb

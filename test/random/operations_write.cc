// Writes into a tensor that others may have saved: legal, or for autograd to refuse.

#include <memory>
#include <thread>

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/variable.h>

#include "offload/managed/postpone.h"
#include "test/random/operation.h"

namespace ebb::graphs {
namespace {

bool update_can_fail(const at::Tensor& x) {
  return (!x.is_floating_point() && !x.is_complex()) || !x.is_non_overlapping_and_dense();
}

std::shared_ptr<PostponedWork> postpone_update(const at::Tensor& x, WorkAt at) {
  if (update_can_fail(x)) {
    return nullptr;
  }
  auto work = postpone(
      x, {}, [](const Tensors& tensors, bool /*has_target*/) { tensors.front().mul_(0.75); }, at);
  if (work != nullptr) {
    torch::autograd::impl::bump_version(x);
  }
  return work;
}

// As an optimizer whose updates wait for the next use, where ebb manages the tensor. Updates that would fail do not
// wait.
bool update_later(const at::Tensor& x) { return postpone_update(x, WorkAt::kDevice) != nullptr; }

// As an optimizer that updates on the CPU, on a thread of its own or at the next use.
bool update_at_home(const at::Tensor& x, bool ahead) {
  const auto work = postpone_update(x, WorkAt::kHome);
  if (work != nullptr && ahead) {
    std::thread([&] { work->run_ahead(); }).join();
  }
  return work != nullptr;
}

}  // namespace

Operations write_operations() {
  constexpr Kind kind = Kind::kWrite;
  return {
      {"relu_", kind, 1, [](const Tensors& x, const Numbers&) { return x[0].relu_(); }},
      {"sigmoid_", kind, 1, [](const Tensors& x, const Numbers&) { return x[0].sigmoid_(); }},
      {"tanh_", kind, 1, [](const Tensors& x, const Numbers&) { return x[0].tanh_(); }},
      {"silu_", kind, 1,
       [](const Tensors& x, const Numbers&) {
         at::Tensor out = x[0];
         return at::silu_(out);
       }},
      {"multiply_", kind, 2, [](const Tensors& x, const Numbers&) { return x[0].mul_(fit(x[1], x[0])); }},
      {"scale_", kind, 1, [](const Tensors& x, const Numbers&) { return x[0].mul_(0.5); }},
      {"add_", kind, 2, [](const Tensors& x, const Numbers&) { return x[0].add_(fit(x[1], x[0])); }},
      {"add_number_", kind, 1, [](const Tensors& x, const Numbers&) { return x[0].add_(0.25); }},
      {"copy_", kind, 2, [](const Tensors& x, const Numbers&) { return x[0].copy_(fit(x[1], x[0])); }},
      {"zero_", kind, 1, [](const Tensors& x, const Numbers&) { return x[0].zero_(); }},
      {"masked_fill_", kind, 1,
       [](const Tensors& x, const Numbers&) { return x[0].masked_fill_(x[0].detach() > 0, 0.5); }},
      {"fill_a_part_", kind, 1,
       [](const Tensors& x, const Numbers& n) {
         const std::int64_t along = dimension(x[0], n[0]);
         x[0].select(along, choose(n[1], x[0].size(along))).fill_(0.75);
         return x[0];
       }},
      {"scale_transposed_", kind, 1,
       [](const Tensors& x, const Numbers&) {
         x[0].transpose(0, -1).mul_(0.5);
         return x[0];
       }},
      {"add_through_detach_", kind, 1,
       [](const Tensors& x, const Numbers&) {
         x[0].detach().add_(0.25);
         return x[0];
       }},
      {"update_", kind, 1,
       [](const Tensors& x, const Numbers&) {
         const at::NoGradGuard no_grad;
         return update_later(x[0]) ? x[0] : x[0].mul_(0.75);
       }},
      {"update_at_home_", kind, 1,
       [](const Tensors& x, const Numbers& n) {
         const at::NoGradGuard no_grad;
         return update_at_home(x[0], choose(n[0], 2) == 0) ? x[0] : x[0].mul_(0.75);
       }},
  };
}

}  // namespace ebb::graphs

// No graph owns itself, though an operation that saved its own output owns a tensor whose history owns the operation.

#include <vector>

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <catch2/catch.hpp>
#include <torch/csrc/autograd/autograd.h>

#include "policy/policies.h"
#include "test/offload/parity.h"

namespace ebb {
namespace {

using Operation = at::Tensor (*)(const at::Tensor&);

// Operations that save their own output: an owner of a tensor whose history owns the operation.
const std::vector<Operation>& savers_of_their_output() {
  static const std::vector<Operation> operations{
      [](const at::Tensor& x) { return x.exp(); },
      [](const at::Tensor& x) { return x.sigmoid(); },
      [](const at::Tensor& x) { return x.softmax(0); },
      [](const at::Tensor& x) { return x.log_softmax(0); },
      [](const at::Tensor& x) { return x.relu(); },
      [](const at::Tensor& x) { return x.tanh(); },
      [](const at::Tensor& x) { return x.abs().sqrt(); },
      [](const at::Tensor& x) { return x.reciprocal(); },
      [](const at::Tensor& x) { return at::rsqrt(x.abs() + 1); },
  };
  return operations;
}

TEST_CASE_METHOD(NoLeak, "operations that save their own outputs are no cycle, whether or not backward runs") {
  const bool backward = GENERATE(false, true);
  const bool keep = GENERATE(false, true);
  for (Setting setting : all_settings()) {
    INFO(setting.name);
    if (keep) {
      setting.options.policy = callback([](const Candidate&) { return Decision::kKeep; });
    }
    Rig rig(setting);
    for (const Operation operation : savers_of_their_output()) {
      const NoLeak freed;
      {
        Inputs in;
        const OffloadGuard guard(rig.offloader());
        const at::Tensor out = operation(in.activation({8}));
        if (backward) {
          in.loss(out).backward();
        }
      }
      rig.check_empty();
    }
  }
}

TEST_CASE_METHOD(NoLeak, "operations in place that save their own outputs are no cycle") {
  for (const Setting& setting : all_settings()) {
    INFO(setting.name);
    Rig rig(setting);
    Inputs in;
    const OffloadGuard guard(rig.offloader());
    for (const bool backward : {false, true}) {
      const NoLeak freed;
      {
        at::Tensor x = in.constant({8}).requires_grad_() * 1.5;
        x.sigmoid_();
        at::Tensor y = x.clone();
        y.exp_();
        at::Tensor z = x.clone();
        z.relu_();
        if (backward) {
          (y + z).sum().backward();
        }
      }
      rig.check_empty();
    }
  }
}

TEST_CASE_METHOD(NoLeak, "the graph of a gradient is no cycle, though its saves were made in backward") {
  for (const Setting& setting : all_settings()) {
    INFO(setting.name);
    Rig rig(setting);
    Inputs in;
    const OffloadGuard guard(rig.offloader());
    for (const Operation operation : savers_of_their_output()) {
      const NoLeak freed;
      {
        const at::Tensor x = in.constant({8}).requires_grad_();
        const at::Tensor out = operation(x * 1.5);
        static_cast<void>(
            torch::autograd::grad({out.square().sum()}, {x}, {}, /*retain_graph=*/true, /*create_graph=*/true));
      }
      rig.check_empty();
    }
  }
}

}  // namespace
}  // namespace ebb

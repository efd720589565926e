// What autograd does not save, or what no hook is asked about: no state, not a byte, not one count.

#include <thread>

#include <ATen/Functions.h>
#include <ATen/ScalarOps.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>
#include <catch2/catch.hpp>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>

#include "test/offload/parity.h"

namespace ebb {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

void check_untouched(const Rig& rig) {
  const Stats stats = rig.stats();
  CHECK(stats.saved.tensors == 0);
  CHECK(stats.saved.bytes == 0);
  for (const Count& kept : stats.kept) {
    CHECK(kept.tensors == 0);
  }
  CHECK(stats.offloaded.tensors == 0);
  CHECK(stats.deduplicated.tensors == 0);
  CHECK(stats.fetched.tensors == 0);
  CHECK(stats.reused.tensors == 0);
  CHECK(stats.steps == 0);
  CHECK(stats.stalls == 0);
  CHECK(stats.pool.peak_bytes == 0);
  CHECK(stats.stash.peak_bytes == 0);
  CHECK(stats.saved_on_device.peak_bytes == 0);
}

at::Tensor saves_much(const at::Tensor& x) { return (x.sin() * x.exp()).pow(2).softmax(0); }

TEST_CASE_METHOD(NoLeak, "a wrapped number that autograd saves is not seen") {
  Rig rig(late());
  const at::Tensor x = at::ones({4}).requires_grad_();
  const OffloadGuard guard(rig.offloader());
  at::Tensor number = at::native::wrapped_scalar_tensor(2.5);
  const at::Tensor loss = at::mul(x, number).sum();
  check_untouched(rig);
  loss.backward();
  CHECK(at::equal(x.grad(), at::full({4}, 2.5)));
}

struct SavesNothing : torch::autograd::Function<SavesNothing> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x) {
    context->save_for_backward({at::Tensor(), at::Tensor()});
    return x * 2;
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const variable_list saved = context->get_saved_variables();
    TORCH_CHECK(saved.size() == 2 && !saved[0].defined() && !saved[1].defined(), "undefined tensors were lost");
    return {gradients[0] * 2};
  }
};

TEST_CASE_METHOD(NoLeak, "undefined tensors that are saved are not seen and come back undefined") {
  Rig rig(late());
  const at::Tensor x = at::ones({4}).requires_grad_();
  const OffloadGuard guard(rig.offloader());
  const at::Tensor loss = SavesNothing::apply(x).sum();
  loss.backward();
  check_untouched(rig);
  CHECK(at::equal(x.grad(), at::full({4}, 2.0)));
}

TEST_CASE_METHOD(NoLeak, "optional tensors that are left out of an operation are not seen") {
  Rig rig(late());
  Inputs in;
  const OffloadGuard guard(rig.offloader());
  const at::Tensor x = in.activation({2, 6});
  const at::Tensor out = at::layer_norm(x, {6});  // saves input, mean and rstd, but neither weight nor bias
  CHECK(rig.stats().saved.tensors == 3);
  CHECK(rig.stats().kept_for(KeptReason::kUnmovable).tensors == 0);
  CHECK(rig.stats().kept_for(KeptReason::kEmpty).tensors == 0);
}

TEST_CASE_METHOD(NoLeak, "a forward pass without gradients leaves nothing under the guard") {
  Rig rig(late());
  const at::Tensor x = at::rand({16}).requires_grad_();
  {
    const at::NoGradGuard no_grad;
    const OffloadGuard guard(rig.offloader());
    saves_much(x);
  }
  {
    const OffloadGuard guard(rig.offloader());
    const at::NoGradGuard no_grad;
    saves_much(x);
  }
  check_untouched(rig);
}

TEST_CASE_METHOD(NoLeak, "in inference mode nothing is saved under the guard") {
  Rig rig(late());
  const at::Tensor x = at::rand({16}).requires_grad_();
  const OffloadGuard guard(rig.offloader());
  const c10::InferenceMode inference;
  saves_much(x);
  check_untouched(rig);
}

TEST_CASE_METHOD(NoLeak, "tensors that require no gradient are not seen, whatever is computed with them") {
  Rig rig(late());
  const OffloadGuard guard(rig.offloader());
  saves_much(at::rand({16}));
  saves_much(at::rand({16}).requires_grad_().detach());
  check_untouched(rig);
}

TEST_CASE_METHOD(NoLeak, "saving an inference tensor is LibTorch's own error, and nothing is kept of it") {
  const Program program = [](const Run& run) {
    at::Tensor made_in_inference;
    {
      const c10::InferenceMode inference;
      made_in_inference = at::ones({4});
    }
    Inputs in;
    const auto guard = run.guard();
    in.loss(in.leaf({4}) * made_in_inference).backward();
    return in.gradients();
  };
  expect_same_error(program, "Inference tensors cannot be saved for backward");
  Rig rig(late());
  (void)outcome(program, Run(&rig.offloader()));
  CHECK(rig.stats().offloaded.tensors == 0);
}

TEST_CASE_METHOD(NoLeak,
                 "a part without gradients inside a forward pass adds nothing to its counts and keeps its gradients") {
  const auto forward = [](Inputs& in, bool with_part) {
    const at::Tensor x = in.activation({16});
    at::Tensor y = x.sin();
    if (with_part) {
      const at::NoGradGuard no_grad;
      saves_much(y);
    }
    return y.pow(2);
  };
  const auto saved = [&](bool with_part) {
    Rig rig(late_without_stash());
    Inputs in;
    const OffloadGuard guard(rig.offloader());
    forward(in, with_part);
    return rig.stats().saved.tensors;
  };
  CHECK(saved(true) == saved(false));
  expect_gradient_parity([&](Inputs& in) { return forward(in, true); });
}

TEST_CASE_METHOD(NoLeak, "operations whose gradients need no values leave nothing under the guard") {
  Rig rig(late());
  Inputs in;
  const at::Tensor x = in.leaf({4, 6});
  const OffloadGuard guard(rig.offloader());
  const at::Tensor out = at::cat({(x + 1) * 3, -x}).view({6, 8}).t().contiguous();
  in.loss(out.sum()).backward();
  CHECK(rig.stats().kept_for(KeptReason::kUnmovable).tensors == 0);
  CHECK(rig.stats().saved.tensors == 1);  // the loss's weight, without dimensions
}

TEST_CASE_METHOD(NoLeak, "a thread without a guard is not seen, though another has one") {
  Rig rig(late());
  const OffloadGuard guard(rig.offloader());
  std::thread([] {
    const at::Tensor x = at::rand({16}).requires_grad_();
    saves_much(x).sum().backward();
  }).join();
  check_untouched(rig);
}

TEST_CASE_METHOD(NoLeak, "a backward pass under the guard that builds no graph saves nothing") {
  Rig rig(late());
  Inputs in;
  const at::Tensor loss = in.loss(saves_much(in.activation({16})));
  const OffloadGuard guard(rig.offloader());
  loss.backward();
  check_untouched(rig);
}

TEST_CASE_METHOD(NoLeak, "a NoOpGuard alone, and one around a double backward, leave all saves to LibTorch") {
  Rig rig(late());
  Inputs in;
  const OffloadGuard guard(rig.offloader());
  const NoOpGuard off;
  const at::Tensor x = in.leaf({16});
  const at::Tensor first = torch::autograd::grad({saves_much(x).sum()}, {x}, {}, true, /*create_graph=*/true)[0];
  in.loss(first).backward();
  check_untouched(rig);
}

}  // namespace
}  // namespace ebb

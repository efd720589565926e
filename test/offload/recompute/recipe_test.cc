// Storages that are dropped in the forward pass and computed again in backward.

#include <array>
#include <functional>
#include <string>
#include <vector>

#include <ATen/Context.h>
#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <ATen/autocast_mode.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/generated/variable_factories.h>
#include <torch/csrc/autograd/grad_mode.h>

#include <catch2/catch.hpp>

#include "policy/policies.h"
#include "test/offload/parity.h"

namespace ebb {
namespace {

constexpr std::array kDtypes{at::kFloat, at::kDouble, at::kBFloat16, at::kHalf};

// Drops whatever it can, and sends the rest away.
Setting dropping(Setting setting = late_without_stash()) {
  setting.options.policy = recompute(Recompute::kComputeBound);
  return setting;
}

// The same gradients, by a backward under the guard and by one after it.
void expect_parity_dropping(const Forward& forward) {
  for (const Setting& setting : some_settings()) {
    for (const bool backward_in_guard : {false, true}) {
      expect_parity(train(forward, backward_in_guard), dropping(setting));
    }
  }
}

// Of a second step: the first one proves that the bytes can be made again.
Stats counted_dropping(Rig& rig, const Forward& forward) {
  static_cast<void>(counted(rig, forward));
  rig.offloader().reset_stats();
  return counted(rig, forward);
}

Stats counted_dropping(const Forward& forward) {
  Rig rig(dropping());
  return counted_dropping(rig, forward);
}

struct Operation {
  std::string name;
  std::function<at::Tensor(Inputs&, at::ScalarType)> run;
  std::size_t saved = 1;  // of what it makes
};

at::Tensor image(Inputs& in, at::ScalarType dtype) { return in.activation({2, 3, 9, 7}, dtype); }

std::vector<Operation> elementwise() {
  return {{"silu",
           [](Inputs& in, auto dtype) {
             return at::silu(in.activation({5, 33}, dtype));
           }},
          {"gelu",
           [](Inputs& in, auto dtype) {
             return at::gelu(in.activation({5, 33}, dtype));
           }},
          {"gelu by tanh",
           [](Inputs& in, auto dtype) {
             return at::gelu(in.activation({5, 33}, dtype), "tanh");
           }},
          {"mish",
           [](Inputs& in, auto dtype) {
             return at::mish(in.activation({5, 33}, dtype));
           }},
          {"hardswish",
           [](Inputs& in, auto dtype) {
             return at::hardswish(in.activation({5, 33}, dtype));
           }},
          {"softplus",
           [](Inputs& in, auto dtype) {
             return at::softplus(in.activation({5, 33}, dtype), 2, 1);
           }},
          {"leaky_relu",
           [](Inputs& in, auto dtype) {
             return at::leaky_relu(in.activation({5, 33}, dtype), 0.2);
           }},
          {"elu",
           [](Inputs& in, auto dtype) {
             return at::elu(in.activation({5, 33}, dtype), 0.7, 1.3, 0.9);
           }},
          {"relu6",
           [](Inputs& in, auto dtype) {
             return at::hardtanh(in.activation({5, 33}, dtype), 0, 6);
           }},
          {"clamp from below",
           [](Inputs& in, auto dtype) {
             return at::clamp(in.activation({5, 33}, dtype), 0.1);
           }},
          {"glu",
           [](Inputs& in, auto dtype) {
             return at::glu(in.activation({6, 33}, dtype), 0);
           }},
          {"sin",
           [](Inputs& in, auto dtype) {
             return at::sin(in.activation({5, 33}, dtype));
           }},
          {"cos",
           [](Inputs& in, auto dtype) {
             return at::cos(in.activation({5, 33}, dtype));
           }},
          {"pow",
           [](Inputs& in, auto dtype) {
             return at::pow(in.activation({5, 33}, dtype), 3);
           }},
          {"mul, broadcast",
           [](Inputs& in, auto dtype) {
             return in.activation({5, 33}, dtype) * in.activation({33}, dtype);
           }},
          {"div",
           [](Inputs& in, auto dtype) {
             return in.activation({5, 33}, dtype) / in.leaf({5, 1}, dtype);
           }},
          {"silu of a transposed view",
           [](Inputs& in, auto dtype) {
             return at::silu(in.activation({5, 33}, dtype).t());
           }},
          {"silu of every other column", [](Inputs& in, auto dtype) {
             return at::silu(in.activation({5, 34}, dtype).slice(1, 0, 34, 2));
           }}};
}

std::vector<Operation> on_images() {
  return {{"reflection_pad2d", [](Inputs& in, auto dtype) {
             return at::reflection_pad2d(image(in, dtype), {3, 1, 2, 0});
           }}};
}

std::vector<Operation> arithmetic() {
  return {{"mm",
           [](Inputs& in, auto dtype) {
             return at::mm(in.activation({7, 24}, dtype), in.leaf({24, 9}, dtype));
           }},
          {"mm with a transposed weight",
           [](Inputs& in, auto dtype) {
             return at::mm(in.activation({7, 24}, dtype), in.leaf({9, 24}, dtype).t());
           }},
          {"bmm",
           [](Inputs& in, auto dtype) {
             return at::bmm(in.activation({3, 7, 8}, dtype), in.activation({3, 8, 5}, dtype));
           }},
          {"linear, three-dimensional",
           [](Inputs& in, auto dtype) {
             return at::linear(in.activation({2, 7, 24}, dtype), in.leaf({9, 24}, dtype));
           }},
          {"convolution",
           [](Inputs& in, auto dtype) {
             return at::conv2d(image(in, dtype), in.leaf({4, 3, 3, 3}, dtype), {}, 2, 1);
           }},
          {"convolution, channels last",
           [](Inputs& in, auto dtype) {
             const at::Tensor x = image(in, dtype).contiguous(at::MemoryFormat::ChannelsLast);
             return at::conv2d(x, in.leaf({4, 3, 3, 3}, dtype), {}, 1, 1);
           }},
          {"attention",
           [](Inputs& in, auto dtype) {
             const auto heads = [&] { return in.activation({2, 3, 16, 8}, dtype); };
             return at::scaled_dot_product_attention(heads(), heads(), heads(), {}, 0, /*is_causal=*/true);
           },
           /*saved=*/2}};  // its result and the sums of its softmax
}

// What the operation makes and autograd saves is dropped, and comes back with the same bits.
void check(const Operation& operation, at::ScalarType dtype) {
  CAPTURE(operation.name, dtype);
  const Forward forward = [&](Inputs& in) { return operation.run(in, dtype).pow(2); };
  expect_parity_dropping(forward);
  const Stats stats = counted_dropping(forward);
  CHECK(stats.dropped.tensors == operation.saved);
  CHECK(stats.recomputed.tensors == operation.saved);
}

TEST_CASE_METHOD(NoLeak, "elementwise operations are recomputed to the bit") {
  const Operation operation = GENERATE(from_range(elementwise()));
  for (const at::ScalarType dtype : kDtypes) {
    check(operation, dtype);
  }
}

TEST_CASE_METHOD(NoLeak, "pooling and padding are recomputed to the bit") {
  const Operation operation = GENERATE(from_range(on_images()));
  for (const at::ScalarType dtype : kDtypes) {
    check(operation, dtype);
  }
}

TEST_CASE_METHOD(NoLeak, "matmul, convolution and attention are recomputed to the bit") {
  const Operation operation = GENERATE(from_range(arithmetic()));
  for (const at::ScalarType dtype : kDtypes) {
    check(operation, dtype);
  }
}

at::Tensor gated_mlp(Inputs& in) {
  const at::Tensor x = in.activation({4, 6, 16});
  const at::Tensor gate = at::silu(at::linear(x, in.leaf({40, 16})));
  return at::linear(gate * at::linear(x, in.leaf({40, 16})), in.leaf({16, 40}));
}

TEST_CASE_METHOD(NoLeak, "recipes run inside recipes, each once") {
  expect_parity_dropping(gated_mlp);
  const Stats stats = counted_dropping(gated_mlp);
  CHECK(stats.dropped.tensors == 4);  // two linears, silu, and the product
  CHECK(stats.recomputed.tensors == 4);
  CHECK(stats.offloaded.tensors == 1);  // their input
}

TEST_CASE_METHOD(NoLeak, "a policy may ask for what is cheap to recompute, and only that is dropped") {
  Setting setting = late_without_stash();
  setting.options.policy = recompute(Recompute::kMemoryBound);
  expect_parity(train(gated_mlp, false), setting);
  Rig rig(setting);
  const Stats stats = counted_dropping(rig, gated_mlp);
  CHECK(stats.dropped.tensors == 2);
  CHECK(stats.offloaded.tensors == 3);
}

TEST_CASE_METHOD(NoLeak, "what is dropped takes no memory on either side until backward asks") {
  Rig rig(dropping());
  const auto forward = [](Inputs& in) { return at::silu(in.activation({64, 64})).pow(2); };
  static_cast<void>(counted_dropping(rig, forward));
  Inputs in;
  at::Tensor out;
  {
    const auto guard = guard_on(rig);
    out = forward(in).sum();
  }
  rig.offloader().drain();
  constexpr std::uint64_t kInput = 64 * 64 * sizeof(float);
  CHECK(rig.stats().saved_on_device.now_bytes == 0);
  CHECK(rig.stats().pool.now_bytes >= kInput);
  CHECK(rig.stats().pool.now_bytes < 2 * kInput);
  out.backward();
  CHECK(rig.stats().saved_on_device.peak_bytes >= 2 * kInput);  // the recipe's input and its result
}

TEST_CASE_METHOD(NoLeak, "a chain is cut where recipes would run too deep inside each other") {
  const Forward forward = [](Inputs& in) {
    at::Tensor x = in.activation({8});
    for (int i = 0; i < 20; ++i) {
      x = at::silu(x);
    }
    return x;
  };
  expect_parity_dropping(forward);
  const Stats stats = counted_dropping(forward);
  CHECK(stats.offloaded.tensors == 2);  // the first, and the one after kMaxRecipeDepth others
  CHECK(stats.dropped.tensors == 18);
  CHECK(stats.recomputed.tensors == 18);
}

TEST_CASE_METHOD(NoLeak, "what two operations save is recomputed once for both") {
  const Forward forward = [](Inputs& in) {
    const at::Tensor y = at::silu(in.activation({32}));
    return y.pow(2) + y.sin();
  };
  expect_parity_dropping(forward);
  const Stats stats = counted_dropping(forward);
  CHECK(stats.deduplicated.tensors == 1);
  CHECK(stats.recomputed.tensors == 1);
}

TEST_CASE_METHOD(NoLeak, "a value that nobody saves is made again where a recipe begins from it") {
  const Forward forward = [](Inputs& in) {
    const at::Tensor sum = at::linear(in.activation({6, 8}), in.leaf({8, 8}));
    return sum.to(at::kDouble).pow(2);
  };
  expect_parity_dropping(forward);
  const Stats stats = counted_dropping(forward);
  CHECK(stats.dropped.tensors == 2);  // the sum and what it is cast to
  CHECK(stats.recomputed.tensors == 2);
  CHECK(stats.offloaded.tensors == 1);
}

TEST_CASE_METHOD(NoLeak, "a value that two recipes begin from is dropped once, also where the one is for the other") {
  const Forward forward = [](Inputs& in) {
    const at::Tensor one = at::linear(in.activation({6, 8}), in.leaf({8, 8}));
    const at::Tensor two = at::linear(one * in.leaf({8}), in.leaf({8, 8}));
    return (two + one).to(at::kDouble).pow(2);
  };
  expect_parity_dropping(forward);
  const Stats stats = counted_dropping(forward);
  CHECK(stats.kept_for(KeptReason::kPolicy).tensors == 0);
  CHECK(stats.recomputed.tensors == stats.dropped.tensors);
  CHECK(stats.saved_on_device.now_bytes == 0);
}

TEST_CASE_METHOD(NoLeak, "recipes of values count where recipes would run too deep inside each other") {
  constexpr int kManyLayers = 2 * kMaxRecipeDepth;
  const Forward forward = [](Inputs& in) {
    at::Tensor x = in.activation({6, 8});
    for (int i = 0; i < kManyLayers; ++i) {
      x = at::linear(x, in.leaf({8, 8})).to(at::kDouble).sin().to(at::kFloat);
    }
    return x;
  };
  expect_parity_dropping(forward);
  CHECK(counted_dropping(forward).offloaded.tensors > 2);  // the chain is cut
}

TEST_CASE_METHOD(NoLeak, "a mask, which has no gradient, is made again with the numbers that it was drawn from") {
  const Forward forward = [](Inputs& in) {
    at::manual_seed(1);
    return std::get<0>(at::native_dropout(at::relu(in.activation({6, 8})), 0.5, /*train=*/true));
  };
  expect_parity_dropping(forward);
  CHECK(counted_dropping(forward).dropped.tensors == 2);  // of relu and the mask
}

TEST_CASE_METHOD(NoLeak, "a view of what is dropped comes back over all of it") {
  const Forward forward = [](Inputs& in) {
    const at::Tensor y = at::silu(in.activation({6, 8}));
    return y.t().pow(2).sum() + y.narrow(1, 2, 3).pow(3).sum() + at::mm(y, y.t()).sum();
  };
  expect_parity_dropping(forward);
  CHECK(counted_dropping(forward).recomputed.tensors == 1);
}

TEST_CASE_METHOD(NoLeak, "a retained graph recomputes at each backward") {
  const Program program = [](const Run& run) {
    Inputs in;
    at::Tensor loss;
    {
      const auto guard = run.guard();
      loss = in.loss(gated_mlp(in));
    }
    loss.backward({}, /*retain_graph=*/true);
    loss.backward();
    return in.gradients();
  };
  expect_parity(program, dropping());
}

TEST_CASE_METHOD(NoLeak, "what is dropped survives a backward that frees its recipe's node") {
  const Program program = [](const Run& run) {
    Inputs in;
    const at::Tensor weight = in.leaf({32});
    at::Tensor first;
    at::Tensor second;
    {
      const auto guard = run.guard();
      const at::Tensor y = at::silu(in.activation({32}));
      first = y.sum();
      second = (y * weight).sum();
    }
    first.backward();  // silu lets go of its input
    return torch::autograd::grad({second}, {weight});
  };
  expect_parity(program, dropping());
}

TEST_CASE_METHOD(NoLeak, "a derivative of a derivative may recompute") {
  const Program program = [](const Run& run) {
    Inputs in;
    const auto guard = run.guard();
    const at::Tensor x = in.activation({32});
    const at::Tensor loss = (at::silu(x) * x.sin()).pow(2).sum();
    const at::Tensor gradient = torch::autograd::grad({loss}, {x}, {}, /*retain_graph=*/true, /*create_graph=*/true)[0];
    gradient.pow(2).sum().backward();
    Tensors result = in.gradients();
    result.push_back(gradient.detach());
    return result;
  };
  for (const Setting& setting : some_settings()) {
    expect_parity(program, dropping(setting));
  }
}

TEST_CASE_METHOD(NoLeak, "what was written to without a gradient after it was made is not recomputed") {
  const Forward forward = [](Inputs& in) {
    const at::Tensor y = at::silu(in.activation({32}));
    {
      const at::NoGradGuard no_grad;
      y.mul_(2);
    }
    return y.pow(2);
  };
  expect_parity_dropping(forward);
  CHECK(counted_dropping(forward).dropped.tensors == 0);
}

TEST_CASE_METHOD(NoLeak, "a recipe whose input was written to raises LibTorch's error") {
  const Program program = [](const Run& run) {
    Inputs in;
    at::Tensor loss;
    {
      const auto guard = run.guard();
      const at::Tensor x = in.activation({32});
      loss = at::silu(x).pow(2).sum();
      const at::NoGradGuard no_grad;
      x.add_(1);
    }
    loss.backward();
    return in.gradients();
  };
  const Outcome expected = plain(program);
  const Outcome found = [&] {
    Rig rig(dropping());
    return outcome(program, Run(&rig.offloader()));
  }();
  CHECK(expected.error.find("modified by an inplace operation") != std::string::npos);
  CHECK(found.error == expected.error);
}

TEST_CASE_METHOD(NoLeak, "what an operation took from a random one is saved, not drawn again") {
  const Forward forward = [](Inputs& in) {
    at::manual_seed(7);
    const at::Tensor noise = at::dropout(in.activation({64}), 0.5, /*train=*/true);
    return (noise * in.activation({64})).pow(2);
  };
  expect_parity_dropping(forward);
  CHECK(counted_dropping(forward).recomputed.tensors == 1);  // the product
}

TEST_CASE_METHOD(NoLeak, "a detached tensor is not recomputed, so that what made it may be written to") {
  const Program program = [](const Run& run) {
    Inputs in;
    const at::Tensor weight = in.leaf({8, 8});
    at::Tensor loss;
    {
      const auto guard = run.guard();
      const at::Tensor made = at::mm(in.activation({8, 8}), weight);
      loss = (made.detach() * in.leaf({8})).pow(2).sum();
      const at::NoGradGuard no_grad;
      weight.add_(1);
    }
    loss.backward();
    return in.gradients();
  };
  expect_parity(program, dropping());
}

TEST_CASE_METHOD(NoLeak, "a layer with a bias is recomputed with the bias that it had, though nobody has saved that") {
  using Layer = std::function<at::Tensor(Inputs&, const at::Tensor& bias)>;
  const Layer linear = [](Inputs& in, const at::Tensor& bias) {
    return at::linear(in.activation({16, 16}), in.leaf({8, 16}), bias);
  };
  const Layer convolution = [](Inputs& in, const at::Tensor& bias) {
    return at::conv2d(in.activation({2, 3, 9, 7}), in.leaf({8, 3, 3, 3}), bias);
  };
  for (const Layer& layer : {linear, convolution}) {
    CHECK(counted_dropping([&](Inputs& in) { return layer(in, in.leaf({8})).pow(2); }).dropped.tensors == 1);
    expect_parity(
        [&](const Run& run) {
          Inputs in;
          at::Tensor loss;
          {
            const auto guard = run.guard();
            const at::Tensor bias = in.leaf({8});
            loss = in.loss(layer(in, bias).pow(2));
            const at::NoGradGuard no_grad;
            bias.add_(1);
          }
          loss.backward();
          return in.gradients();
        },
        dropping());
  }
}

TEST_CASE_METHOD(NoLeak, "what is computed from something written to since has no recipe") {
  const Program program = [](const Run& run) {
    Inputs in;
    const at::Tensor weight = in.leaf({32});
    at::Tensor loss;
    {
      const auto guard = run.guard();
      const at::Tensor x = in.activation({32});
      const at::Tensor y = at::silu(x);
      {
        const at::NoGradGuard no_grad;
        x.add_(1);
      }
      loss = (y * weight).sum();  // saves y
    }
    return torch::autograd::grad({loss}, {weight});
  };
  expect_parity(program, dropping());
}

TEST_CASE_METHOD(NoLeak, "a view that was given other memory is saved with that") {
  const Forward forward = [](Inputs& in) {
    const at::Tensor y = at::silu(in.activation({4, 4}));
    at::Tensor view = y.view({16});
    view.set_data(at::arange(64, at::kFloat).narrow(0, 8, 16));
    return view.pow(2).sum() + y.sum();
  };
  CHECK(counted_dropping([](Inputs& in) {
          return at::silu(in.activation({4})).view({2, 2}).pow(2);
        }).dropped.tensors == 1);
  expect_parity(train(forward, false), dropping());
}

TEST_CASE_METHOD(NoLeak, "under autocast a recipe computes in the precision of the forward pass") {
  const Program program = [](const Run& run) {
    Inputs in;
    at::Tensor loss;
    {
      const auto guard = run.guard();
      at::autocast::set_autocast_enabled(at::kCPU, true);
      loss = in.loss(gated_mlp(in).to(at::kFloat));
      at::autocast::clear_cache();
      at::autocast::set_autocast_enabled(at::kCPU, false);
    }
    loss.backward();
    return in.gradients();
  };
  Rig rig(dropping());
  check_same(plain(program), outcome(program, Run(&rig.offloader())));
  check_same(plain(program), outcome(program, Run(&rig.offloader())));
  CHECK(rig.stats().recomputed.tensors == 4);
}

TEST_CASE_METHOD(NoLeak, "a recipe computes without autocast where backward runs under it and forward did not") {
  const Program program = [](const Run& run) {
    Inputs in;
    at::Tensor loss;
    {
      const auto guard = run.guard();
      loss = in.loss(at::mm(in.activation({7, 24}), in.leaf({24, 9})).pow(2));
    }
    at::autocast::set_autocast_enabled(at::kCPU, true);
    loss.backward();
    at::autocast::clear_cache();
    at::autocast::set_autocast_enabled(at::kCPU, false);
    return in.gradients();
  };
  expect_parity(program, dropping());
}

TEST_CASE_METHOD(NoLeak, "a policy that recomputes what cannot be keeps it") {
  class RecomputeAll final : public Policy {
   public:
    void begin_step() override {}
    [[nodiscard]] Decision decide(const Candidate& /*candidate*/) override { return Decision::kRecompute; }
    [[nodiscard]] bool needs_operation() const override { return false; }
  };
  Setting setting = late_without_stash();
  setting.options.policy = std::make_shared<RecomputeAll>();
  expect_parity(train(gated_mlp, false), setting);
  Rig rig(setting);
  const Stats stats = counted(rig, gated_mlp);
  CHECK(stats.dropped.tensors == 0);
  CHECK(stats.kept_for(KeptReason::kPolicy).tensors == 5);
}

}  // namespace
}  // namespace ebb

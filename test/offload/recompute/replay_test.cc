// Which operations are logged, and what is made again from the log.

#include <algorithm>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <catch2/catch.hpp>

#include "policy/policies.h"
#include "test/offload/parity.h"

namespace ebb {
namespace {

Setting dropping() {
  Setting setting = late_without_stash();
  setting.options.policy = recompute(Recompute::kComputeBound);
  return setting;
}

// What the third step dropped. The first one proves what is made from what stayed, the second one what is made from
// what the first one has proven.
std::uint64_t dropped_by(const Forward& forward) {
  Rig rig(dropping());
  for (int step = 0; step < 2; ++step) {
    static_cast<void>(counted(rig, forward));
  }
  rig.offloader().reset_stats();
  return counted(rig, forward).dropped.tensors;
}

struct Kind {
  std::string name;
  std::uint64_t dropped;
  Forward forward;
};

at::Tensor x_of(Inputs& in) { return in.activation({16, 16}); }

std::vector<Kind> kinds() {
  return {{"a layer with a bias, and a residual sum", 1,
           [](Inputs& in) {
             const at::Tensor x = x_of(in);
             return (x + at::linear(x, in.leaf({16, 16}), in.leaf({16}))).pow(2);
           }},
          {"a norm in float of a sum in half precision", 2,
           [](Inputs& in) {
             const at::Tensor x = in.activation({16, 16}, at::kBFloat16);
             const at::Tensor wide = at::linear(x.sin(), in.leaf({16, 16}, at::kBFloat16)).to(at::kFloat);
             const at::Tensor scale = at::rsqrt(wide.pow(2).mean({-1}, /*keepdim=*/true) + 1e-5);
             return (wide * scale).to(at::kBFloat16) * in.leaf({16}, at::kBFloat16);
           }},
          {"a layer norm with weight and bias", 1,
           [](Inputs& in) { return at::layer_norm(x_of(in).sin(), {16}, in.leaf({16}), in.leaf({16})).pow(2); }},
          {"dropout", 2, [](Inputs& in) { return at::dropout(x_of(in).sin().exp(), 0.3, /*train=*/true).pow(2); }},
          {"a softmax over masked values", 1,
           [](Inputs& in) {
             const at::Tensor x = x_of(in);
             const at::Tensor scores = at::mm(x, x.t()).masked_fill(at::ones({16, 16}, at::kBool).triu(1), -1e4);
             return at::mm(at::softmax(scores, -1), x);
           }},
          {"lists of tensors", 1,
           [](Inputs& in) {
             const at::Tensor x = x_of(in);
             const std::vector<at::Tensor> halves = at::mm(x, in.leaf({16, 16})).chunk(2, 1);
             return at::cat({halves[1].neg(), halves[0]}, 1).pow(2);
           }},
          {"an index", 1,
           [](Inputs& in) {
             const at::Tensor x = x_of(in);
             const at::Tensor made = at::mm(x, in.leaf({16, 16}));
             return made.index({at::arange(0, 16, 2, at::kLong), at::indexing::Slice()}).pow(2);
           }},
          {"writes to what an operation has made", 1,
           [](Inputs& in) {
             const at::Tensor x = x_of(in);
             at::Tensor made = at::mm(x, in.leaf({16, 16})) + 1;
             made.neg_().mul_(2);
             made.narrow(0, 2, 3).add_(1);
             return made.pow(2);
           }},
          {"what was copied into empty memory", 1,
           [](Inputs& in) {
             const at::Tensor made = at::empty({16, 16});
             made.copy_(at::mm(x_of(in), in.leaf({16, 16})));
             return made.pow(2);
           }},
          {"several results of one operation", 1, [](Inputs& in) {
             const at::Tensor x = x_of(in);
             const auto [values, indices] = at::mm(x, in.leaf({16, 16})).sort(-1);
             return values.pow(2);
           }}};
}

TEST_CASE_METHOD(NoLeak, "what ordinary programs compute is made again to the bit", "[recompute]") {
  const Kind kind = GENERATE(from_range(kinds()));
  CAPTURE(kind.name);
  CHECK(dropped_by(kind.forward) >= kind.dropped);
  expect_parity(
      [&](const Run& run) {
        Tensors found;
        at::manual_seed(3);
        for (int step = 0; step < 4; ++step) {
          Inputs in;
          at::Tensor loss;
          {
            const auto guard = run.guard();
            loss = in.loss(kind.forward(in));
          }
          loss.backward();
          for (const at::Tensor& gradient : in.gradients()) {
            found.push_back(gradient);
          }
        }
        found.push_back(at::rand({4}));  // the random state afterwards
        return found;
      },
      dropping());
}

// What no log can know.
std::vector<Kind> opaque() {
  return {{"bytes written without an operation", 0,
           [](Inputs& in) {
             const at::Tensor made = at::silu(x_of(in));
             made.mutable_data_ptr<float>()[7] = 5;
             return made.pow(2);
           }},
          {"memory filled without an operation", 0,
           [](Inputs& in) {
             const at::Tensor filled = at::empty({16, 16});
             std::fill_n(filled.mutable_data_ptr<float>(), filled.numel(), 3.F);
             return (at::mm(x_of(in).detach(), filled) * in.leaf({16, 16})).pow(2);
           }},
          {"a value written while its result is needed", 0, [](Inputs& in) {
             const at::Tensor input = in.constant({256, 256});  // too large to copy
             const at::Tensor made = input + in.leaf({256, 1});
             const at::Tensor result = made.sin();
             input.zero_();
             return result;
           }}};
}

TEST_CASE_METHOD(NoLeak, "what a log cannot know is never dropped for it", "[recompute]") {
  const Kind kind = GENERATE(from_range(opaque()));
  CAPTURE(kind.name);
  Rig rig(dropping());
  Inputs same;
  const at::Tensor expected = kind.forward(same).sum();
  expected.backward();
  for (int step = 0; step < 4; ++step) {
    Inputs in;
    at::Tensor loss;
    {
      const OffloadGuard guard(rig.offloader());
      loss = kind.forward(in).sum();
    }
    loss.backward();
    check_same({same.gradients(), ""}, {in.gradients(), ""});
  }
}

TEST_CASE_METHOD(NoLeak, "a generator of the program's is drawn from once", "[recompute]") {
  Rig rig(dropping());
  for (int step = 0; step < 3; ++step) {
    at::Generator own = at::detail::createCPUGenerator(7);
    static_cast<void>(counted(rig, [&](Inputs& in) {
      const at::Tensor x = x_of(in);
      return (at::bernoulli(at::sigmoid(x.detach()), own) * x.exp()).pow(2);
    }));
    at::Generator same = at::detail::createCPUGenerator(7);
    static_cast<void>(at::bernoulli(at::full({16, 16}, 0.5), same));
    CHECK(at::rand({4}, own).equal(at::rand({4}, same)));
  }
}

TEST_CASE_METHOD(NoLeak, "running statistics are written once", "[recompute]") {
  Rig rig(dropping());
  const at::Tensor mean = at::zeros({3});
  const at::Tensor variance = at::ones({3});
  const at::Tensor same_mean = mean.clone();
  const at::Tensor same_variance = variance.clone();
  const auto forward = [](Inputs& in, const at::Tensor& mean, const at::Tensor& variance) {
    const at::Tensor x = at::conv2d(in.activation({2, 3, 9, 7}), in.leaf({3, 3, 3, 3}), {}, 1, 1);
    const at::Tensor normed =
        at::batch_norm(x, in.leaf({3}), in.leaf({3}), mean, variance, /*training=*/true, 0.1, 1e-5, false);
    return at::relu(normed).pow(2);
  };
  for (int step = 0; step < 4; ++step) {
    Inputs in;
    at::Tensor loss;
    {
      const OffloadGuard guard(rig.offloader());
      loss = forward(in, mean, variance).sum();
    }
    loss.backward();
    Inputs same;
    forward(same, same_mean, same_variance).sum().backward();
    check_same({same.gradients(), ""}, {in.gradients(), ""});
    CHECK(mean.equal(same_mean));
    CHECK(variance.equal(same_variance));
  }
  CHECK(rig.stats().recomputed.tensors >= 3);  // of the norm and of what is made from the norm, in each step but one
}

TEST_CASE_METHOD(NoLeak, "a norm that does not train reads its statistics as they are", "[recompute]") {
  const at::Tensor mean = at::randn({3});
  const at::Tensor variance = at::ones({3});
  const auto dropped = dropped_by([&](Inputs& in) {
    const at::Tensor x = at::conv2d(in.activation({2, 3, 9, 7}), in.leaf({3, 3, 3, 3}), {}, 1, 1);
    return at::batch_norm(x, in.leaf({3}), {}, mean, variance, /*training=*/false, 0.1, 1e-5, false).exp().pow(2);
  });
  CHECK(dropped >= 1);
}

// Autograd saves the cast alone. What is cast is bound by arithmetic, and the recipe begins from there.
at::Tensor cast_of(Inputs& in, at::Tensor& wide) {
  wide = at::linear(x_of(in).sin(), in.leaf({16, 16}));
  return wide.to(at::kDouble);
}

Setting moving_values(bool move) {
  Setting setting = late();
  setting.options.policy = recompute(Recompute::kMemoryBound, move ? offload_everything() : keep_everything(0));
  return setting;
}

TEST_CASE_METHOD(NoLeak, "a cast is made again from what nobody saves, and whoever writes to that",
                 "[recompute][ordering]") {
  const int written = GENERATE(0, 1, 2);
  const bool move = GENERATE(false, true);
  CAPTURE(written, move);
  const Forward forward = [written](Inputs& in) {
    at::Tensor wide;
    const at::Tensor squared = cast_of(in, wide).pow(2);
    if (written == 1) {
      wide.add_(1);
    } else if (written == 2) {
      const at::NoGradGuard no_grad;
      wide.detach().zero_();
    }
    return squared + wide.sum();
  };
  Rig rig(moving_values(move));
  for (int step = 0; step < 4; ++step) {
    Inputs in;
    at::Tensor loss;
    {
      const OffloadGuard guard(rig.offloader());
      loss = forward(in).sum();
    }
    loss.backward();
    Inputs same;
    forward(same).sum().backward();
    check_same({same.gradients(), ""}, {in.gradients(), ""});
  }
  CHECK(rig.stats().recomputed.bytes >= 3 * 16 * 16 * sizeof(double));
}

TEST_CASE_METHOD(NoLeak, "what the program holds on to is no value to begin from", "[recompute]") {
  Rig rig(moving_values(/*move=*/false));
  for (int step = 0; step < 4; ++step) {
    Inputs in;
    at::Tensor wide;
    at::Tensor loss;
    {
      const OffloadGuard guard(rig.offloader());
      loss = cast_of(in, wide).pow(2).sum();
    }
    {
      const at::NoGradGuard no_grad;
      wide.zero_();  // which plain autograd does not forbid, and no log sees
    }
    loss.backward();
    Inputs same;
    cast_of(same, wide).pow(2).sum().backward();
    check_same({same.gradients(), ""}, {in.gradients(), ""});
  }
}

TEST_CASE_METHOD(NoLeak, "an operation that fails takes nothing from the next", "[recompute]") {
  const Forward forward = [](Inputs& in) {
    const at::Tensor x = x_of(in);
    CHECK_THROWS(at::mm(x, in.constant({3, 3})));
    at::Tensor made = at::mm(x, in.leaf({16, 16}));
    return at::silu(made);
  };
  CHECK(dropped_by(forward) >= 1);
}

}  // namespace
}  // namespace ebb

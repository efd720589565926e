// Errors by their type and from everywhere: the user's code in hooks, functions, policies and threads, and calls that
// the tier refuses. Each arrives as it was thrown, nothing is left behind, and the next step is exact.

#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>
#include <catch2/catch.hpp>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>

#include "policy/policy.h"
#include "test/offload/networks.h"
#include "test/offload/parity.h"

namespace ebb {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::grad;
using torch::autograd::variable_list;

// An error of the user's own type.
struct UserError : std::range_error {
  UserError() : std::range_error("the user's own error, number 42") {}
};

// Expects `bad` to throw a UserError, nothing to be left, and an exact step after it; in every setting, three times.
void expect_user_error(const std::function<void(const Run&)>& bad) {
  const Program good = train(three_layers, true);
  const Outcome expected = plain(good);
  for (const Setting& setting : all_settings()) {
    INFO(setting.name);
    Rig rig(setting);
    for (int step = 0; step < 3; ++step) {
      CHECK_THROWS_AS(bad(Run(&rig.offloader())), UserError);
      forget_failed_backward();
      rig.check_empty();
      check_same(expected, outcome(good, Run(&rig.offloader())));
      rig.check_empty();
    }
  }
}

TEST_CASE_METHOD(NoLeak, "what a function's forward throws arrives with its type") {
  struct Fails : Function<Fails> {
    static at::Tensor forward(AutogradContext* context, const at::Tensor& x) {
      context->save_for_backward({x, x.exp()});
      throw UserError();
    }
    static variable_list backward(AutogradContext* /*context*/, variable_list gradients) { return gradients; }
  };
  expect_user_error([](const Run& run) {
    Inputs in;
    const auto guard = run.guard();
    Fails::apply(three_layers(in));
  });
}

TEST_CASE_METHOD(NoLeak, "what a tensor's hook throws in backward arrives with its type") {
  expect_user_error([](const Run& run) {
    Inputs in;
    const auto guard = run.guard();
    const at::Tensor x = three_layers(in);
    x.register_hook([](const at::Tensor& /*gradient*/) -> at::Tensor { throw UserError(); });
    in.loss(x.exp()).backward();
  });
}

// Throws in its backward, which may itself run inside a backward.
struct FailsInBackward : Function<FailsInBackward> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, std::int64_t depth) {
    context->save_for_backward({x});
    context->saved_data["depth"] = depth;
    return x.clone();
  }
  static variable_list backward(AutogradContext* context, variable_list /*gradients*/) {
    const std::int64_t depth = context->saved_data["depth"].toInt();
    if (depth == 0) {
      throw UserError();
    }
    const at::AutoGradMode with_grad(true);
    const at::Tensor x = context->get_saved_variables()[0].detach().requires_grad_();
    const at::Tensor y = FailsInBackward::apply(x.sin(), depth - 1);
    return {grad({y.pow(2).sum()}, {x})[0], at::Tensor()};
  }
};

TEST_CASE_METHOD(NoLeak, "what is thrown in a backward inside a backward arrives with its type") {
  const bool backward_in_guard = GENERATE(false, true);
  expect_user_error([=](const Run& run) {
    Inputs in;
    auto guard = run.guard();
    const at::Tensor loss = in.loss(FailsInBackward::apply(three_layers(in), 3).exp());
    if (!backward_in_guard) {
      guard.reset();
    }
    loss.backward();
  });
}

TEST_CASE_METHOD(NoLeak, "what is thrown on a thread of the engine's own arrives on the caller's with its type") {
  Rig rig(late_without_stash());
  for (int step = 0; step < 2; ++step) {
    Inputs in;
    at::Tensor loss;
    {  // not around backward: the engine's thread lets go of its graphs only some time after the error has arrived
      const OffloadGuard guard(rig.offloader());
      loss = in.loss(FailsInBackward::apply(in.activation({4}), 70));
    }
    CHECK_THROWS_AS(loss.backward(), UserError);
    forget_failed_backward();
  }
  rig.check_empty();
  const Program good = train(three_layers, true);
  check_same(plain(good), outcome(good, Run(&rig.offloader())));
}

TEST_CASE_METHOD(NoLeak,
                 "what is thrown in a backward that runs on another thread arrives there, and harms no other thread") {
  expect_user_error([](const Run& run) {
    Inputs in;
    auto guard = run.guard();
    const at::Tensor bad = in.loss(FailsInBackward::apply(three_layers(in), 0));
    const at::Tensor good = in.loss(three_layers(in));
    guard.reset();
    std::exception_ptr thrown;
    std::thread([&] {
      try {
        bad.backward();
      } catch (...) {
        thrown = std::current_exception();
      }
      forget_failed_backward();
    }).join();
    good.backward();
    CHECK(at::isfinite(in.gradients().back()).all().item<bool>());
    std::rethrow_exception(thrown);
  });
}

TEST_CASE_METHOD(NoLeak, "after an error in the backward of a retained graph, the graph is as good as before") {
  bool fail = false;
  const Program program = [&](const Run& run) {
    Inputs in;
    auto guard = run.guard();
    const at::Tensor x = three_layers(in);
    x.register_hook([&](const at::Tensor& gradient) {
      if (fail) {
        throw UserError();
      }
      return gradient;
    });
    const at::Tensor loss = in.loss(x.exp().pow(2));
    guard.reset();
    fail = true;
    CHECK_THROWS_AS(loss.backward({}, /*retain_graph=*/true), UserError);
    fail = false;
    loss.backward();
    return in.gradients();
  };
  expect_parity(program);
}

// Throws when a step begins, or at one of its storages.
class Throwing final : public Policy {
 public:
  void begin_step() override {
    if (at_begin) {
      throw UserError();
    }
  }
  [[nodiscard]] Decision decide(const Candidate& candidate) override {
    if (at_ordinal == candidate.ordinal) {
      throw UserError();
    }
    return Decision::kOffload;
  }
  [[nodiscard]] bool needs_operation() const override { return false; }

  bool at_begin = false;
  std::optional<std::uint64_t> at_ordinal;
};

TEST_CASE_METHOD(NoLeak,
                 "what a policy throws arrives with its type, whichever storage it is asked about, or at the begin") {
  const Program good = train(three_layers, true);
  const Outcome expected = plain(good);
  const auto policy = std::make_shared<Throwing>();
  Setting setting = late_without_stash();
  setting.options.policy = policy;
  Rig rig(setting);
  for (std::uint64_t ordinal = 0; ordinal <= 9; ++ordinal) {
    policy->at_begin = ordinal == 9;  // there are nine storages
    policy->at_ordinal = ordinal;
    {
      Inputs in;
      const OffloadGuard guard(rig.offloader());
      CHECK_THROWS_AS(three_layers(in), UserError);
    }
    rig.check_empty();
    policy->at_begin = false;
    policy->at_ordinal.reset();
    check_same(expected, outcome(good, Run(&rig.offloader())));
  }
}

TEST_CASE_METHOD(NoLeak, "what a policy throws about a save of a double backward arrives with its type") {
  const auto policy = std::make_shared<Throwing>();
  Setting setting = late();
  setting.options.policy = policy;
  Rig rig(setting);
  const Program program = [](const Run& run) {
    Inputs in;
    const at::Tensor x = in.leaf({8});
    const at::Tensor loss = in.loss((x * 1.5).sin().exp());
    const auto guard = run.guard();
    const at::Tensor first = grad({loss}, {x}, {}, /*retain_graph=*/true, /*create_graph=*/true)[0];
    in.loss(first).backward();
    return in.gradients();
  };
  policy->at_ordinal = 0;
  CHECK_THROWS_AS(program(Run(&rig.offloader())), UserError);
  forget_failed_backward();
  rig.check_empty();
  policy->at_ordinal.reset();
  check_same(plain(program), outcome(program, Run(&rig.offloader())));
}

TEST_CASE_METHOD(NoLeak, "threads of which some fail in forward and some in backward leave the others exact") {
  const Program good = train(three_layers, true);
  const Outcome expected = plain(good);
  Rig rig(late_without_stash());
  std::vector<std::thread> threads;
  std::vector<Outcome> found(6);
  for (std::size_t i = 0; i < found.size(); ++i) {
    threads.emplace_back([&, i] {
      const Program bad = [&](const Run& run) -> Tensors {
        Inputs in;
        const auto guard = run.guard();
        const at::Tensor x = FailsInBackward::apply(three_layers(in), 0);
        if (i % 3 == 1) {
          throw UserError();
        }
        in.loss(x).backward();
        return {};
      };
      for (int step = 0; step < 4; ++step) {
        found[i] = outcome(i % 3 == 0 ? good : bad, Run(&rig.offloader()));
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  for (std::size_t i = 0; i < found.size(); ++i) {
    if (i % 3 == 0) {
      check_same(expected, found[i]);
    } else {
      CHECK(found[i].error == UserError().what());
    }
  }
}

}  // namespace
}  // namespace ebb

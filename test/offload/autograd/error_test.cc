// Exceptions from everywhere: their texts arrive, nothing is left behind, and the next step is exact.

#include <stdexcept>

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <catch2/catch.hpp>
#include <torch/csrc/autograd/custom_function.h>

#include "policy/policies.h"
#include "test/offload/networks.h"
#include "test/offload/parity.h"

namespace ebb {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Runs the bad program and then a good one, a few times, with one offloader.
void expect_recovery(const Program& bad, const std::string& text, const Setting& setting) {
  INFO(setting.name);
  const Program good = train(three_layers, true);
  const Outcome expected = plain(good);
  Rig rig(setting);
  for (int step = 0; step < 3; ++step) {
    CHECK_THAT(outcome(bad, Run(&rig.offloader())).error, Catch::Contains(text));
    rig.check_empty();
    check_same(expected, outcome(good, Run(&rig.offloader())));
    rig.check_empty();
  }
}

TEST_CASE_METHOD(NoLeak, "an exception in the forward pass leaves nothing behind") {
  for (const Setting& setting : all_settings()) {
    expect_recovery(
        [](const Run& run) -> Tensors {
          Inputs in;
          const auto guard = run.guard();
          const at::Tensor x = three_layers(in);
          throw std::runtime_error("the user's forward failed");
        },
        "the user's forward failed", setting);
  }
}

struct FailsInBackward : torch::autograd::Function<FailsInBackward> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x) {
    context->save_for_backward({x});
    return x.clone();
  }
  static variable_list backward(AutogradContext* context, const variable_list& /*gradients*/) {
    const auto saved = context->get_saved_variables();
    throw std::runtime_error("the user's backward failed");
  }
};

TEST_CASE_METHOD(NoLeak, "an exception in the backward pass leaves nothing behind") {
  for (const Setting& setting : all_settings()) {
    expect_recovery(
        [](const Run& run) {
          Inputs in;
          const auto guard = run.guard();
          in.loss(FailsInBackward::apply(three_layers(in)).sin().pow(2)).backward();
          return in.gradients();
        },
        "the user's backward failed", setting);
  }
}

TEST_CASE_METHOD(NoLeak,
                 "what a policy throws reaches the forward pass, and the policy is asked again in the next step") {
  bool fail = false;
  Setting setting = late();
  setting.options.policy = callback([&](const Candidate& candidate) {
    if (fail && candidate.ordinal == 2) {
      throw std::runtime_error("the user's policy failed");
    }
    return Decision::kOffload;
  });
  expect_recovery(
      [&](const Run& run) {
        Inputs in;
        const auto guard = run.guard();
        fail = true;
        const std::shared_ptr<bool> no_longer(&fail, [](bool* flag) { *flag = false; });
        in.loss(three_layers(in)).backward();
        return in.gradients();
      },
      "the user's policy failed", setting);
}

std::vector<Setting> simulated_settings() {
  std::vector<Setting> settings = all_settings();
  std::erase_if(settings, [](const Setting& setting) { return !setting.schedule || setting.options.capacity_bytes; });
  return settings;
}

// A failed copy of a storage that nobody asks for again need not be an error, but no gradient may come from one.
TEST_CASE_METHOD(NoLeak, "a copy that fails is an error with its text or does not matter, whichever copy it is") {
  const Program good = train(three_layers, true);
  const Outcome expected = plain(good);
  int errors = 0;
  for (const Setting& setting : simulated_settings()) {
    Rig rig(setting);
    for (std::uint64_t nth = 1; nth <= 20; ++nth) {
      INFO(setting.name << ", copy " << nth);
      rig.tier().fail_copy(nth);
      const Outcome found = outcome(good, Run(&rig.offloader()));
      rig.tier().fail_copy(0);
      if (found.error.empty()) {
        check_same(expected, found);
      } else {
        ++errors;
        CHECK_THAT(found.error, Catch::Contains("simulated copy failure"));
      }
      rig.check_empty();
      check_same(expected, outcome(good, Run(&rig.offloader())));
    }
  }
  CHECK(errors > 20);
}

TEST_CASE_METHOD(NoLeak, "after a copy in that failed, the same graph can be asked again") {
  Rig rig(late_without_stash());
  Inputs in;
  at::Tensor loss;
  {
    const OffloadGuard guard(rig.offloader());
    loss = in.activation({16}).pow(2).sum();
  }
  rig.tier().fail_copy(1);
  CHECK_THROWS_WITH(loss.backward({}, /*retain_graph=*/true), Catch::Contains("simulated copy failure"));
  loss.backward();
  CHECK(at::isfinite(in.gradients()[0]).all().item<bool>());
}

TEST_CASE_METHOD(NoLeak, "a storage larger than a window that was set is an error at its save with both sizes") {
  Setting setting = late();
  setting.options.window_bytes = 1 << 10;
  Rig rig(setting);
  const Program program = [](const Run& run) {
    Inputs in;
    const auto guard = run.guard();
    at::Tensor x = in.activation({16, 16}).sin();
    return Tensors{in.activation({257}).pow(2).detach(), x.detach()};
  };
  const std::string error = outcome(program, Run(&rig.offloader())).error;
  CHECK_THAT(error, Catch::Contains("window_bytes") && Catch::Contains("1.0 KiB"));
  rig.check_empty();
  expect_parity(train([](Inputs& in) { return in.activation({256}).pow(2); }, true), setting);
}

}  // namespace
}  // namespace ebb

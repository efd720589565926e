// Many threads, one offloader; one graph, many threads; backward within backward.

#include <array>
#include <barrier>
#include <stdexcept>
#include <thread>
#include <vector>

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <catch2/catch.hpp>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>

#include "test/offload/parity.h"

namespace ebb {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::grad;
using torch::autograd::variable_list;

at::Tensor network(Inputs& in) {
  at::Tensor x = in.activation({5, 8});
  for (int layer = 0; layer < 2; ++layer) {
    x = at::linear(x, in.leaf({8, 8})).sigmoid() * x.sin();
  }
  return x;
}

// Runs act(0), act(1), ... each on a thread of its own. They start together; none may use Catch2.
template <typename Act>
void on_threads(std::size_t count, const Act& act) {
  std::barrier start(static_cast<std::ptrdiff_t>(count));
  std::vector<std::jthread> threads;
  for (std::size_t i = 0; i < count; ++i) {
    threads.emplace_back([&, i] {
      start.arrive_and_wait();
      act(i);
    });
  }
}

std::vector<Setting> some_settings() { return {late_without_stash(), disk(), all_settings()[4]}; }

TEST_CASE_METHOD(NoLeak, "sixteen threads on one offloader each get their own exact gradients") {
  const std::array<Program, 2> programs{train(network, true), train(network, false)};
  const Outcome expected = plain(programs[0]);
  for (const Setting& setting : some_settings()) {
    INFO(setting.name);
    Rig rig(setting);
    std::array<std::vector<Outcome>, 16> outcomes;
    on_threads(16, [&](std::size_t i) {
      for (int step = 0; step < 4; ++step) {
        outcomes[i].push_back(outcome(programs[i % 2], Run(&rig.offloader())));
      }
    });
    for (const auto& of_thread : outcomes) {
      for (const Outcome& found : of_thread) {
        check_same(expected, found);
      }
    }
    rig.check_empty();
  }
}

TEST_CASE_METHOD(NoLeak, "eight threads that go backward through one retained graph at once get the same gradients") {
  for (const Setting& setting : some_settings()) {
    INFO(setting.name);
    Rig rig(setting);
    Inputs in;
    const at::Tensor leaf = in.leaf({6, 6});
    const auto forward = [&leaf] { return at::mm(leaf.sin() * 1.5, leaf.exp()).softmax(1).pow(3).sum(); };
    const at::Tensor expected = grad({forward()}, {leaf})[0];
    at::Tensor loss;
    {
      const OffloadGuard guard(rig.offloader());
      loss = forward();
    }
    std::array<Tensors, 8> found;
    on_threads(found.size(), [&](std::size_t i) {
      for (int pass = 0; pass < 5; ++pass) {
        found[i].push_back(grad({loss}, {leaf}, {}, /*retain_graph=*/true)[0]);
      }
    });
    for (const Tensors& of_thread : found) {
      for (const at::Tensor& gradient : of_thread) {
        CHECK(gradient.equal(expected));
      }
    }
    loss.reset();
    rig.check_empty();
  }
}

TEST_CASE_METHOD(NoLeak, "parts of one graph that different threads run give the gradients of the whole") {
  expect_parity([](const Run& run) {
    Inputs in;
    auto guard = run.guard();
    const at::Tensor leaf = in.leaf({6, 6});
    const at::Tensor trunk = at::mm(leaf.sin() * 1.5, leaf.exp());
    Tensors heads;
    for (int i = 0; i < 6; ++i) {
      heads.push_back((trunk.sigmoid() * trunk.cos()).pow(i + 1).sum());
    }
    guard.reset();
    Tensors of_heads(heads.size());
    on_threads(heads.size(), [&](std::size_t i) { of_heads[i] = grad({heads[i]}, {trunk}, {}, true)[0]; });
    at::Tensor sum = at::zeros_like(trunk);
    for (const at::Tensor& each : of_heads) {
      sum = sum + each;
    }
    std::thread([&] { trunk.backward(sum); }).join();
    return in.gradients();
  });
}

TEST_CASE_METHOD(NoLeak, "a graph whose thread has ended, guard and all, goes backward on any other") {
  expect_parity([](const Run& run) {
    Inputs in;
    at::Tensor loss;
    std::thread([&] {
      const auto guard = run.guard();
      loss = in.loss(network(in));
    }).join();
    std::thread([&] { loss.backward({}, /*retain_graph=*/true); }).join();
    loss.backward();
    return in.gradients();
  });
}

TEST_CASE_METHOD(NoLeak, "guards of two offloaders that cross on two threads keep to their own") {
  Rig first(late_without_stash());
  Rig second(disk());
  std::array<Rig*, 2> rigs{&first, &second};
  std::array<Inputs, 2> in;
  std::array<at::Tensor, 2> losses;
  std::barrier both(2);
  on_threads(2, [&](std::size_t i) {
    const OffloadGuard outer(rigs[i]->offloader());
    both.arrive_and_wait();
    at::Tensor x = in[i].activation({16}).exp();  // saved once
    {
      both.arrive_and_wait();
      const OffloadGuard inner(rigs[1 - i]->offloader());
      both.arrive_and_wait();
      x = (x * 1.5).sin().sin().sin();  // three times
    }
    both.arrive_and_wait();
    losses[i] = (x * 1.5).sin().sin().sum();  // twice
  });
  CHECK(first.stats().saved.tensors == 6);
  CHECK(second.stats().saved.tensors == 6);
  on_threads(2, [&](std::size_t i) { losses[1 - i].backward(); });
  CHECK(in[0].gradients()[0].equal(in[1].gradients()[0]));
  CHECK(first.stats().fetched.tensors == 6);
  CHECK(second.stats().fetched.tensors == 6);
}

TEST_CASE_METHOD(NoLeak, "threads that drop graphs disturb none that go backward through theirs") {
  const Outcome expected = plain(train(network, false));
  for (const Setting& setting : some_settings()) {
    INFO(setting.name);
    Rig rig(setting);
    std::array<std::vector<Outcome>, 6> outcomes;
    on_threads(outcomes.size(), [&](std::size_t i) {
      for (int step = 0; step < 6; ++step) {
        if (i % 2 == 0) {
          outcomes[i].push_back(outcome(train(network, false), Run(&rig.offloader())));
        } else {
          Inputs in;
          const OffloadGuard guard(rig.offloader());
          static_cast<void>(network(in));
        }
      }
    });
    for (const auto& of_thread : outcomes) {
      for (const Outcome& found : of_thread) {
        check_same(expected, found);
      }
    }
    rig.check_empty();
  }
}

TEST_CASE_METHOD(NoLeak, "errors on some threads reach those, and the others' gradients are exact") {
  const Program good = train(network, true);
  const Program bad = [](const Run& run) -> Tensors {
    Inputs in;
    const auto guard = run.guard();
    const at::Tensor out = network(in);
    out.register_hook([](const at::Tensor&) { throw std::runtime_error("one thread's hook failed"); });
    in.loss(out.exp()).backward();
    return {};
  };
  const Outcome expected = plain(good);
  Rig rig(late_without_stash());
  std::array<Outcome, 8> outcomes;
  on_threads(outcomes.size(),
             [&](std::size_t i) { outcomes[i] = outcome(i % 2 == 0 ? good : bad, Run(&rig.offloader())); });
  for (std::size_t i = 0; i < outcomes.size(); ++i) {
    if (i % 2 == 0) {
      check_same(expected, outcomes[i]);
    } else {
      CHECK_THAT(outcomes[i].error, Catch::Contains("one thread's hook failed"));
    }
  }
}

TEST_CASE_METHOD(NoLeak, "statistics may be read while threads work, and end where the work ends") {
  Rig rig(late_without_stash());
  std::array<Outcome, 4> outcomes;
  on_threads(5, [&](std::size_t i) {
    for (int step = 0; step < 10; ++step) {
      if (i < outcomes.size()) {
        outcomes[i] = outcome(train(network, true), Run(&rig.offloader()));
      } else {
        static_cast<void>(rig.stats());
        rig.offloader().drain();
      }
    }
  });
  const Outcome expected = plain(train(network, true));
  for (const Outcome& found : outcomes) {
    check_same(expected, found);
  }
  const Stats stats = rig.stats();
  CHECK(stats.steps == 40);
  CHECK(stats.saved.tensors % 40 == 0);
}

TEST_CASE_METHOD(NoLeak, "an offloader may end while another thread goes backward through its graph") {
  const Outcome expected = plain(train(network, false));
  for (int round = 0; round < 10; ++round) {
    auto offloader = std::make_unique<Offloader>(disk().options);
    Inputs in;
    at::Tensor loss;
    {
      const OffloadGuard guard(*offloader);
      loss = in.loss(network(in));
    }
    on_threads(2, [&](std::size_t i) {
      if (i == 0) {
        loss.backward();
      } else {
        offloader.reset();
      }
    });
    check_same({{expected.tensors.begin() + 1, expected.tensors.end()}, ""}, {in.gradients(), ""});
  }
}

// Each backward runs a forward and a backward of its own, `depth` levels deep: at each level the derivative of x^2.
struct Nested : torch::autograd::Function<Nested> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, std::int64_t depth) {
    context->save_for_backward({x});
    context->saved_data["depth"] = depth;
    return x.clone();
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const std::int64_t depth = context->saved_data["depth"].toInt();
    const at::AutoGradMode with_gradients(true);
    const at::Tensor x = context->get_saved_variables()[0].detach().requires_grad_();
    const at::Tensor negated = x * -1.0;
    const at::Tensor y = depth == 0 ? negated.square() : Nested::apply(negated, depth - 1);
    return {gradients[0] * grad({y.sum()}, {x})[0], at::Tensor()};
  }
};

// LibTorch starts a thread for each 60 levels.
constexpr std::int64_t kLevels = 130;
constexpr std::int64_t kDeep = 10'000;

TEST_CASE_METHOD(NoLeak, "backward within backward, 10,000 levels deep, saves at each level and is exact") {
  Rig rig(late_without_stash());
  Inputs in;
  const at::Tensor leaf = in.leaf({2});
  const OffloadGuard guard(rig.offloader());
  const at::Tensor loss = Nested::apply(leaf * 1.5, kDeep).sum();
  loss.backward();
  CHECK(rig.stats().saved.tensors >= static_cast<std::uint64_t>(kDeep));
  CHECK(leaf.grad().equal((leaf.detach() * 1.5) * 2 * 1.5));
}

TEST_CASE_METHOD(NoLeak, "backward within backward on LibTorch's own threads goes through the guard and is exact") {
  expect_parity([](const Run& run) {
    Inputs in;
    const auto guard = run.guard();
    in.loss(Nested::apply(in.activation({6}, at::kDouble), kLevels)).backward();
    return in.gradients();
  });
  Rig rig(late_without_stash());
  Inputs in;
  const OffloadGuard guard(rig.offloader());
  in.loss(Nested::apply(in.activation({6}, at::kDouble), kLevels)).backward();
  CHECK(rig.stats().offloaded.tensors >= kLevels);
}

TEST_CASE_METHOD(NoLeak, "a hook that runs another graph's backward leaves both exact") {
  expect_parity([](const Run& run) {
    Inputs outer;
    Inputs inner;
    const auto guard = run.guard();
    const at::Tensor inner_loss = inner.loss(network(inner));
    const at::Tensor out = network(outer);
    out.register_hook([&](const at::Tensor&) { inner_loss.backward({}, /*retain_graph=*/true); });
    const at::Tensor loss = outer.loss(out.exp());
    loss.backward({}, /*retain_graph=*/true);
    loss.backward();
    Tensors results = outer.gradients();
    for (at::Tensor& gradient : inner.gradients()) {
      results.push_back(std::move(gradient));
    }
    return results;
  });
}

}  // namespace
}  // namespace ebb

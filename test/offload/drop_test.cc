// Graphs that end without a backward, or late, or not where they began: not one byte stays.

#include <algorithm>
#include <array>
#include <filesystem>
#include <iterator>
#include <memory>
#include <thread>
#include <utility>

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <catch2/catch.hpp>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>

#include "policy/callback.h"
#include "test/offload/parity.h"

namespace ebb {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

at::Tensor network(Inputs& in) {
  at::Tensor x = in.activation({5, 8});
  for (int layer = 0; layer < 2; ++layer) {
    x = at::linear(x, in.leaf({8, 8})).sigmoid() * x.sin();
  }
  return x;
}

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

TEST_CASE_METHOD(NoLeak, "of a graph that is dropped in part, the bytes of that part go and the rest is exact") {
  Rig rig(late_without_stash());
  Inputs in;
  const at::Tensor leaf = in.leaf({1024});
  at::Tensor kept;
  at::Tensor dropped;
  {
    const OffloadGuard guard(rig.offloader());
    const at::Tensor trunk = leaf * 1.5;
    kept = trunk.sin().exp();     // saves the trunk and its own output
    dropped = trunk.cos().exp();  // the same
  }
  CHECK(rig.stats().pool.now_bytes == 3 * 1024 * sizeof(float));
  dropped.reset();
  CHECK(rig.stats().pool.now_bytes == 2 * 1024 * sizeof(float));
  const at::Tensor gradient = torch::autograd::grad({kept.sum()}, {leaf})[0];
  CHECK(rig.stats().pool.now_bytes == 0);
  CHECK(gradient.equal((leaf * 1.5).sin().exp().detach() * (leaf * 1.5).cos().detach() * 1.5));
}

// So many small graphs that whatever stays of each would show: bytes, entries of a table, open tickets.
void drop_many(const Setting& setting, int count) {
  Rig rig(setting);
  Inputs in;
  const at::Tensor leaf = in.leaf({4});
  const OffloadGuard guard(rig.offloader());
  static_cast<void>(leaf.exp());
  rig.check_empty();
  const std::uint64_t capacity = rig.stats().pool.capacity_bytes;
  const NoLeak freed;
  for (int i = 0; i < count; ++i) {
    static_cast<void>(leaf.exp());
  }
  rig.check_empty();
  CHECK(rig.stats().offloaded.tensors == static_cast<std::uint64_t>(count) + 1);
  CHECK(rig.stats().pool.capacity_bytes == capacity);
}

TEST_CASE_METHOD(NoLeak, "of 100,000 graphs that are dropped without backward not one byte stays") {
  drop_many(late_without_stash(), 100'000);
}

TEST_CASE_METHOD(NoLeak, "of 10,000 graphs that are dropped while their bytes go to the disk not one byte stays") {
  Setting setting = disk();
  setting.options.stash_bytes.reset();
  drop_many(setting, 10'000);
}

TEST_CASE_METHOD(NoLeak,
                 "four graphs of one offloader go backward in each of their 24 orders, and each frees its own") {
  const auto build = [](Inputs& in, std::size_t which) {
    at::Tensor x = in.activation({5, static_cast<std::int64_t>(4 + which)});
    return in.loss((x.sigmoid() * x.sin()).exp());
  };
  std::array<Tensors, 4> expected;
  for (std::size_t i = 0; i < expected.size(); ++i) {
    Inputs in;
    build(in, i).backward();
    expected[i] = in.gradients();
  }
  for (const Setting& setting : {late_without_stash(), disk(), all_settings()[4]}) {
    INFO(setting.name);
    Rig rig(setting);
    std::array<std::size_t, 4> order{0, 1, 2, 3};
    do {
      std::array<Inputs, 4> in;
      std::array<at::Tensor, 4> losses;
      {
        const OffloadGuard guard(rig.offloader());
        for (std::size_t i = 0; i < losses.size(); ++i) {
          losses[i] = build(in[i], i);
        }
      }
      for (const std::size_t i : order) {
        const std::uint64_t before = rig.stats().pool.now_bytes;
        losses[i].backward();
        CHECK(rig.stats().pool.now_bytes < before);
        check_same({expected[i], ""}, {in[i].gradients(), ""});
      }
      CHECK(rig.stats().pool.now_bytes == 0);
    } while (std::ranges::next_permutation(order).found);
  }
}

TEST_CASE_METHOD(NoLeak, "gradients accumulate over micro-batches whose backward comes late and in reverse order") {
  expect_parity([](const Run& run) {
    Inputs in;
    const at::Tensor weight = in.leaf({8, 8});
    Tensors losses;
    for (int batch = 0; batch < 5; ++batch) {
      const auto guard = run.guard();
      losses.push_back(at::linear(in.constant({3 + batch, 8}) * 0.5, weight).sigmoid().pow(2).sum());
    }
    while (!losses.empty()) {
      losses.back().backward();
      losses.pop_back();
    }
    return in.gradients();
  });
}

TEST_CASE_METHOD(NoLeak, "micro-batches that are dropped between others add nothing and disturb nothing") {
  expect_parity([](const Run& run) {
    Inputs in;
    const at::Tensor weight = in.leaf({8, 8});
    for (int batch = 0; batch < 6; ++batch) {
      const auto guard = run.guard();
      const at::Tensor loss = at::linear(in.constant({3, 8}) * 0.5, weight).sigmoid().pow(2).sum();
      if (batch % 2 == 0) {
        loss.backward();
      }
    }
    return in.gradients();
  });
}

at::Tensor unpacked;  // what a backward has put aside

struct PutsAside : torch::autograd::Function<PutsAside> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x) {
    context->save_for_backward({x});
    return x.square();
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    unpacked = context->get_saved_variables()[0];
    return {gradients[0] * unpacked * 2};
  }
};

TEST_CASE_METHOD(NoLeak,
                 "what backward unpacked may outlive its graph and the offloader, and is counted until its end") {
  for (const Setting& setting : all_settings()) {
    INFO(setting.name);
    at::Tensor expected;
    {
      Rig rig(setting);
      Inputs in;
      at::Tensor loss;
      {
        const OffloadGuard guard(rig.offloader());
        const at::Tensor x = in.activation({64});
        expected = x.detach().clone();
        loss = PutsAside::apply(x).sum();
      }
      loss.backward();
      loss.reset();
      unpacked = unpacked.detach();
      if (rig.stats().fetched.tensors > 0) {
        CHECK(rig.stats().saved_on_device.now_bytes == 64 * sizeof(float));
        const at::Tensor lives_on = unpacked;
        unpacked.reset();
        CHECK(rig.stats().saved_on_device.now_bytes == 64 * sizeof(float));
        unpacked = lives_on.clone();
      }
    }
    CHECK(unpacked.equal(expected));
    unpacked.reset();
  }
}

TEST_CASE_METHOD(NoLeak, "a fetched tensor that outlives its offloader keeps its bytes") {
  Inputs in;
  at::Tensor expected;
  {
    auto tier = std::make_shared<SimulatedTier>(Schedule::kLate, 0, std::nullopt, /*deferred_compute=*/false);
    Offloader offloader(late_without_stash().options, tier);
    at::Tensor loss;
    {
      const OffloadGuard guard(offloader);
      const at::Tensor x = in.activation({64});
      expected = x.detach().clone();
      loss = PutsAside::apply(x).sum();
    }
    loss.backward();
    CHECK(offloader.stats().fetched.tensors == 1);
  }
  CHECK(unpacked.equal(expected));
  unpacked.reset();
}

std::ptrdiff_t entries(const char* folder) {
  return std::distance(std::filesystem::directory_iterator(folder), std::filesystem::directory_iterator());
}

TEST_CASE_METHOD(NoLeak, "an offloader for each of many steps is exact and leaves no thread and no open file") {
  const Program program = train(network, true);
  const Outcome expected = plain(program);
  for (const auto& each : {std::pair(late_without_stash(), 200), std::pair(disk(), 40)}) {
    const Setting& setting = each.first;
    INFO(setting.name);
    const auto step = [&] {
      Rig rig(setting);
      check_same(expected, outcome(program, Run(&rig.offloader())));
    };
    step();
    const std::ptrdiff_t files = entries("/proc/self/fd");
    const std::ptrdiff_t threads = entries("/proc/self/task");
    for (int i = 1; i < each.second; ++i) {
      step();
    }
    CHECK(entries("/proc/self/fd") == files);
    CHECK(entries("/proc/self/task") < threads + 20);  // a thread that was joined is listed for a moment more
  }
}

TEST_CASE_METHOD(NoLeak, "an offloader that ends before backward, while its successor works, leaves its graph exact") {
  const Outcome expected = plain(train(network, false));
  Inputs first;
  Inputs second;
  at::Tensor losses[2];
  auto rig = std::make_unique<Rig>(late());
  {
    const OffloadGuard guard(rig->offloader());
    const at::Tensor out = network(first);
    losses[0] = first.loss(out);
  }
  const auto tier = [] { return std::make_shared<SimulatedTier>(Schedule::kLate, 0, std::nullopt, false); };
  auto offloader = std::make_unique<Offloader>(late().options, tier());
  {
    const OffloadGuard guard(*offloader);
    losses[1] = second.loss(network(second));
  }
  offloader = std::make_unique<Offloader>(late().options, tier());  // the old one's graph lives on
  {
    Inputs third;
    const OffloadGuard guard(*offloader);
    third.loss(network(third)).backward();
  }
  losses[0].backward();
  losses[1].backward();
  losses[0].reset();
  CHECK(std::ranges::equal(first.gradients(), second.gradients(),
                           [](const at::Tensor& a, const at::Tensor& b) { return a.equal(b); }));
  check_same({{expected.tensors.begin() + 1, expected.tensors.end()}, ""}, {first.gradients(), ""});
}

TEST_CASE_METHOD(NoLeak, "a graph may be dropped on another thread than it was built on, and in its own backward") {
  for (const Setting& setting : all_settings()) {
    INFO(setting.name);
    Rig rig(setting);
    Inputs in;
    at::Tensor elsewhere;
    at::Tensor within;
    {
      const OffloadGuard guard(rig.offloader());
      elsewhere = in.loss(network(in));
      within = in.loss(network(in).exp());
    }
    std::thread([dropped = std::exchange(elsewhere, {})]() mutable { dropped.reset(); }).join();
    within.register_hook([&within](const at::Tensor&) { within.reset(); });
    within.backward();
    rig.check_empty();
  }
}

TEST_CASE_METHOD(NoLeak, "outputs of one operation that nobody uses leave nothing behind") {
  expect_parity([](const Run& run) {
    Inputs in;
    const auto guard = run.guard();
    const at::Tensor x = in.activation({6, 8});
    const auto [variance, mean] = at::var_mean(x, 1);
    const std::vector<at::Tensor> parts = x.exp().unbind(0);
    const auto [values, indices] = x.sin().max(1);
    in.loss(parts[3]).backward({}, /*retain_graph=*/true);
    in.loss(mean + values).backward();
    return in.gradients();
  });
}

}  // namespace
}  // namespace ebb

// Threads: shared offloaders, one for each, and backward where it pleases.

#include <array>
#include <thread>

#include <ATen/TensorOperators.h>
#include <catch2/catch.hpp>

#include "test/offload/networks.h"
#include "test/offload/on_threads.h"
#include "test/offload/parity.h"

namespace ebb {
namespace {

TEST_CASE_METHOD(NoLeak, "backward may run on another thread than forward") {
  expect_parity([](const Run& run) {
    Inputs in;
    auto guard = run.guard();
    const at::Tensor loss = in.loss(two_layers(in));
    guard.reset();
    std::thread([&] { loss.backward(); }).join();
    return in.gradients();
  });
}

// Runs `program` `steps` times on each of as many threads as there are offloaders, and checks the outcomes.
void expect_parity_on_threads(const Program& program, const std::vector<Offloader*>& offloaders, int steps) {
  const Outcome expected = plain(program);
  std::vector<std::vector<Outcome>> outcomes(offloaders.size());
  on_threads(offloaders.size(), [&](std::size_t i) {
    for (int step = 0; step < steps; ++step) {
      outcomes[i].push_back(outcome(program, Run(offloaders[i])));
    }
  });
  for (const auto& of_thread : outcomes) {
    for (const Outcome& found : of_thread) {
      check_same(expected, found);
    }
  }
}

TEST_CASE_METHOD(NoLeak, "threads that share an offloader do not disturb one another") {
  for (const Setting& setting : all_settings()) {
    INFO(setting.name);
    Rig rig(setting);
    Offloader* const shared = &rig.offloader();
    expect_parity_on_threads(train(two_layers, true), {shared, shared, shared}, 5);
    expect_parity_on_threads(train(two_layers, false), {shared, nullptr}, 5);
    rig.check_empty();
  }
}

TEST_CASE_METHOD(NoLeak, "eight threads with an offloader each do not disturb one another") {
  std::vector<std::unique_ptr<Rig>> rigs;
  std::vector<Offloader*> offloaders;
  for (std::size_t i = 0; i < 8; ++i) {
    rigs.push_back(std::make_unique<Rig>(all_settings()[i]));
    offloaders.push_back(&rigs.back()->offloader());
  }
  expect_parity_on_threads(train(two_layers, true), offloaders, 5);
}

TEST_CASE_METHOD(NoLeak, "threads that go backward at once through graphs that share saves get exact gradients") {
  expect_parity([](const Run& run) {
    Inputs shared;
    std::array<Inputs, 4> in;
    Tensors losses;
    {
      const auto guard = run.guard();
      const at::Tensor factor = two_layers(shared).exp();
      for (Inputs& each : in) {
        losses.push_back((each.activation({5, 8}) * factor).pow(2).sum());
      }
    }
    on_threads(losses.size(), [&](std::size_t i) { losses[i].backward({}, /*retain_graph=*/true); });
    Tensors results = shared.gradients();  // each a sum of four equal ones, whatever their order
    for (const Inputs& each : in) {
      results.push_back(each.gradients()[0]);
    }
    return results;
  });
}

}  // namespace
}  // namespace ebb

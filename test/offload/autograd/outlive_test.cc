// What outlives what: an unpacked tensor its graph and offloader, a graph its offloader, a process many offloaders.

#include <algorithm>
#include <filesystem>
#include <iterator>
#include <memory>
#include <utility>

#include <ATen/TensorOperators.h>
#include <catch2/catch.hpp>
#include <torch/csrc/autograd/custom_function.h>

#include "test/offload/networks.h"
#include "test/offload/parity.h"

namespace ebb {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

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
    Offloader offloader(late_without_stash().options, make_tier(late_without_stash()));
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
  const Program program = train(two_layers, true);
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
  const Outcome expected = plain(train(two_layers, false));
  Inputs first;
  Inputs second;
  at::Tensor losses[2];
  auto rig = std::make_unique<Rig>(late());
  {
    const OffloadGuard guard(rig->offloader());
    const at::Tensor out = two_layers(first);
    losses[0] = first.loss(out);
  }
  auto offloader = make_offloader(late(), make_tier(late()));
  {
    const OffloadGuard guard(*offloader);
    losses[1] = second.loss(two_layers(second));
  }
  offloader = make_offloader(late(), make_tier(late()));  // the old one's graph lives on
  {
    Inputs third;
    const OffloadGuard guard(*offloader);
    third.loss(two_layers(third)).backward();
  }
  losses[0].backward();
  losses[1].backward();
  losses[0].reset();
  CHECK(std::ranges::equal(first.gradients(), second.gradients(),
                           [](const at::Tensor& a, const at::Tensor& b) { return a.equal(b); }));
  check_same({{expected.tensors.begin() + 1, expected.tensors.end()}, ""}, {first.gradients(), ""});
}

}  // namespace
}  // namespace ebb

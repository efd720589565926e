// Several graphs of one offloader at once, as of micro-batches: backward in any order, or in some of them not at all.

#include <algorithm>
#include <array>

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <catch2/catch.hpp>

#include "test/offload/parity.h"

namespace ebb {
namespace {

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
  for (const Setting& setting : some_settings()) {
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

}  // namespace
}  // namespace ebb

// Copies in that start before backward asks for anything: where steps wait for copies, and only there.

#include <vector>

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <catch2/catch.hpp>
#include <torch/csrc/autograd/autograd.h>

#include "offload/steps/stall_monitor.h"
#include "test/offload/parity.h"
#include "test/simulated/simulated_stream_guard.h"

namespace ebb {
namespace {

constexpr std::int64_t kNumbers = 32;
constexpr std::uint64_t kBytes = kNumbers * sizeof(float);
constexpr int kSaves = 6;

// When backward has begun and asked for nothing yet.
struct Seen {
  std::uint64_t window_bytes = 0;
  std::uint64_t copied_bytes = 0;  // memory that copies in have taken
};

// A step's forward: saves kSaves storages of kBytes under a guard, and after them runs a head that ebb does not see,
// in whose backward `seen` is filled in.
at::Tensor forward(Rig& rig, Inputs& in, Seen& seen) {
  at::Tensor x = in.activation({kNumbers});
  {
    const OffloadGuard guard(rig.offloader());
    for (int i = 0; i < kSaves; ++i) {
      x = x.sin();
    }
  }
  x.register_hook([&](const at::Tensor& /*gradient*/) {
    seen = {rig.stats().window.now_bytes, rig.tier().device_bytes().now};
  });
  return (x * 2).sum();
}

std::vector<std::uint64_t> windows_of_steps(Rig& rig, int steps) {
  std::vector<std::uint64_t> windows;
  for (int i = 0; i < steps; ++i) {
    Inputs in;
    Seen seen;
    forward(rig, in, seen).backward();
    windows.push_back(seen.window_bytes);
  }
  return windows;
}

Setting waiting() {
  Setting setting = late_without_stash();
  setting.options.window_bytes = 3 * kBytes;
  return setting;
}

}  // namespace

TEST_CASE_METHOD(NoLeak, "where steps wait for copies, the window is filled before backward asks for anything") {
  Rig rig(waiting());
  // The first step's order is not expected, the second's wait is seen by the third.
  CHECK(windows_of_steps(rig, 4) == std::vector<std::uint64_t>{0, 0, 3 * kBytes, 3 * kBytes});
}

TEST_CASE_METHOD(NoLeak, "where steps do not wait, nothing is fetched before backward asks for it") {
  Setting setting = waiting();
  setting.schedule = Schedule::kEarly;
  Rig rig(setting);
  CHECK(windows_of_steps(rig, 6) == std::vector<std::uint64_t>(6, 0));
}

TEST_CASE_METHOD(NoLeak, "the automatic window is larger while steps wait for copies") {
  Rig rig(late_without_stash());
  const auto limit_after_steps = [&](int steps) {
    for (int i = 0; i < steps; ++i) {
      Inputs in;
      {
        const OffloadGuard guard(rig.offloader());
        at::Tensor x = in.activation({kNumbers});
        for (int save = 0; save < 48; ++save) {
          x = x.sin();
        }
        x.sum().backward();
      }
    }
    return rig.stats().window.capacity_bytes;
  };
  CHECK(limit_after_steps(2) == 48 * kBytes / 12);
  CHECK(limit_after_steps(1) == 48 * kBytes / 6);
}

TEST_CASE_METHOD(NoLeak, "gradients are the same with an early start, step after step") {
  const Program program = [](const Run& run) {
    Tensors gradients;
    for (int i = 0; i < 4; ++i) {
      Inputs in;
      at::Tensor loss;
      {
        const auto guard = run.guard();
        at::Tensor x = in.activation({kNumbers});
        const at::Tensor first = x.sin();
        loss = (first.exp() * first).cos().sum();
      }
      (loss * 2).backward();
      for (const at::Tensor& gradient : in.gradients()) {
        gradients.push_back(gradient);
      }
    }
    return gradients;
  };
  expect_parity(program, waiting());
}

TEST_CASE_METHOD(NoLeak, "what was fetched early for a graph on which backward did not run is given up") {
  Rig rig(waiting());
  windows_of_steps(rig, 3);
  Inputs in;
  Seen seen;
  const at::Tensor loss = forward(rig, in, seen);
  const at::Tensor other = at::ones({2}).requires_grad_();
  std::uint64_t window_in_other = 0;
  other.register_hook([&](const at::Tensor& /*gradient*/) { window_in_other = rig.stats().window.now_bytes; });
  (other * 2).sum().backward();
  CHECK(window_in_other == 3 * kBytes);
  CHECK(rig.stats().window.now_bytes == 0);
  (other * 2).sum().backward();
  CHECK(window_in_other == 0);  // a step is tried once
  loss.backward();
  Inputs same;
  at::Tensor x = same.activation({kNumbers});
  for (int i = 0; i < kSaves; ++i) {
    x = x.sin();
  }
  (x * 2).sum().backward();
  CHECK(in.gradients()[0].equal(same.gradients()[0]));
}

TEST_CASE_METHOD(NoLeak,
                 "while steps wait, what the stash still has is kept for backward and takes no room in the window") {
  const bool set_by_user = GENERATE(false, true);
  Setting setting = waiting();
  setting.options.stash_bytes = 2 * kBytes;
  if (!set_by_user) {
    setting.options.window_bytes = std::nullopt;  // room for two of the largest
  }
  Rig rig(setting);
  windows_of_steps(rig, 2);
  const std::uint64_t reused = rig.stats().reused.tensors;
  Inputs in;
  Seen seen;
  forward(rig, in, seen).backward();
  CHECK(seen.window_bytes == (set_by_user ? 3 : 2) * kBytes);
  CHECK(seen.copied_bytes == (set_by_user ? 1 : 2) * kBytes);
  CHECK(rig.stats().reused.tensors == reused + 2);
}

TEST_CASE_METHOD(NoLeak, "while another graph of the thread is in use, nothing is fetched early for a new one") {
  Rig rig(waiting());
  windows_of_steps(rig, 3);
  Inputs in;
  Seen seen_of_first;
  Seen seen;
  const at::Tensor first = forward(rig, in, seen_of_first);
  first.backward({}, /*retain_graph=*/true);
  CHECK(seen_of_first.window_bytes == 3 * kBytes);
  forward(rig, in, seen).backward();
  CHECK(seen.window_bytes == 0);
}

TEST_CASE_METHOD(NoLeak, "nothing is fetched early for another stream than that of the saves") {
  Rig rig(waiting());
  windows_of_steps(rig, 3);
  Inputs in;
  Seen seen;
  const at::Tensor loss = forward(rig, in, seen);
  {
    const SimulatedStreamGuard other(7);
    loss.backward();
  }
  CHECK(seen.window_bytes == 0);
}

TEST_CASE_METHOD(NoLeak, "evaluation between steps leaves the next step's early start alone") {
  Rig rig(waiting());
  windows_of_steps(rig, 3);
  {
    Inputs in;
    Seen seen;
    const at::Tensor never_differentiated = forward(rig, in, seen);
    CHECK(rig.stats().window.now_bytes == 0);
  }
  CHECK(windows_of_steps(rig, 1) == std::vector<std::uint64_t>{3 * kBytes});
}

TEST_CASE(
    "a step is taken to wait from the second wait in an expected order, until four have not waited or a guess was "
    "wrong") {
  StallMonitor watch;
  auto step = [&, so_far = StallStats{}](double ms, bool expected = true) mutable {
    so_far.total_ms += ms;
    return watch.backward_begins(so_far, expected);
  };
  CHECK_FALSE(step(100, /*expected=*/false));
  CHECK_FALSE(step(100));  // of the step whose order was not known
  CHECK_FALSE(step(0.5));
  CHECK(step(2));
  CHECK(watch.steps_wait());
  CHECK(step(0));
  CHECK(step(0));
  CHECK(step(0));
  CHECK_FALSE(step(0));
  CHECK(step(2));
  CHECK_FALSE(step(2, /*expected=*/false));
  CHECK_FALSE(step(100));
  CHECK(watch.steps_wait());
  CHECK(step(100));
  watch.early_prefetch_was_wrong();
  CHECK_FALSE(watch.steps_wait());
  CHECK_FALSE(step(100));
  CHECK(step(100));
}

}  // namespace ebb

// Views, storages that several saves share, and legal in-place writes.

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <catch2/catch.hpp>

#include "test/offload/parity.h"

namespace ebb {
namespace {

constexpr std::uint64_t kFloat = sizeof(float);

TEST_CASE_METHOD(NoLeak, "views come back with their sizes, strides and offsets") {
  expect_gradient_parity([](Inputs& in) {
    const at::Tensor x = in.activation({6, 8});
    at::Tensor sum = x.t().square().sum() + x.narrow(1, 2, 3).square().sum() + x.select(0, 4).pow(3).sum();
    sum = sum + x.slice(0, 0, 6, 2).slice(1, 1, 8, 3).square().sum() + x.view({4, 12}).square().mean();
    sum = sum + x.unfold(1, 3, 2).square().sum() + x.diagonal().pow(3).sum() +
          x.view({2, 3, 8}).permute({2, 0, 1}).pow(3).sum();
    return sum + at::matmul(x, x.t()).sum() + at::matmul(x.t(), x).pow(2).sum();
  });
}

TEST_CASE_METHOD(NoLeak, "expanded tensors come back with stride zero") {
  expect_gradient_parity([](Inputs& in) {
    const at::Tensor row = in.activation({1, 5});
    const at::Tensor scalar = in.activation({});
    return row.expand({7, 5}).pow(2) * scalar.expand({7, 5}).square();
  });
}

TEST_CASE_METHOD(NoLeak, "the parts of split, chunk and unbind share one copy") {
  expect_gradient_parity([](Inputs& in) {
    const at::Tensor x = in.activation({6, 4});
    at::Tensor sum = at::zeros({});
    for (const at::Tensor& part : x.split(2, 0)) {
      sum = sum + part.pow(3).sum();
    }
    for (const at::Tensor& part : x.chunk(2, 1)) {
      sum = sum + part.pow(2).sum();
    }
    for (const at::Tensor& part : x.unbind(0)) {
      sum = sum + part.square().sum();
    }
    return sum;
  });
}

TEST_CASE_METHOD(NoLeak, "overlapping strided views come back") {
  expect_gradient_parity([](Inputs& in) {
    const at::Tensor x = in.activation({20});
    return x.as_strided({5, 4}, {3, 2}, 1).pow(2).sum() + x.as_strided({4, 4}, {1, 2}, 0).square().sum();
  });
}

TEST_CASE_METHOD(NoLeak, "views that change the element type come back") {
  expect_gradient_parity([](Inputs& in) {
    const at::Tensor x = in.activation({4, 6});
    const at::Tensor complex = at::view_as_complex(x.view({4, 3, 2}));
    return at::real(complex * complex).sum() + at::imag(complex).pow(2).sum() + x.pow(3).sum();
  });
}

TEST_CASE_METHOD(NoLeak, "a small view of a large storage comes back with the whole storage's layout") {
  expect_gradient_parity([](Inputs& in) {
    const at::Tensor x = in.activation({64, 64});
    return x.narrow(0, 61, 2).narrow(1, 5, 1).pow(2);
  });
}

TEST_CASE_METHOD(NoLeak, "an input of many operations keeps its gradient") {
  expect_gradient_parity([](Inputs& in) {
    const at::Tensor x = in.activation({9, 9});
    at::Tensor sum = x.sin();
    for (int i = 0; i < 5; ++i) {
      sum = sum + x.pow(i + 2) + at::mm(x, sum) * x.t();
    }
    return sum;
  });
}

TEST_CASE_METHOD(NoLeak, "in-place operations before any save are legal and keep their gradients") {
  expect_gradient_parity([](Inputs& in) {
    at::Tensor x = in.activation({5, 6});
    x.add_(in.activation({5, 6})).mul_(0.5);
    x.relu_();
    at::Tensor y = at::linear(x, in.leaf({6, 6}));
    y.sigmoid_();
    at::Tensor z = y.clone();
    z.select(1, 0).zero_();
    z.narrow(0, 1, 2).mul_(2);
    return z * y;
  });
}

TEST_CASE_METHOD(NoLeak, "a storage that is written to and saved again is a new version with bytes of its own") {
  expect_parity([](const Run& run) {
    Inputs in;
    const auto guard = run.guard();
    at::Tensor x = in.activation({4, 4});
    const at::Tensor never_derived = x.pow(2);  // holds the first version's save
    at::Tensor out = never_derived.detach().clone();
    x.add_(1);
    at::Tensor loss = x.pow(3).sum();
    x.reset();
    loss.backward();
    return Tensors{out, in.gradients()[0]};
  });
}

// Two tensors of one storage, whose versions count apart because `data()` made them: the second one is filled after the
// first one was saved, and both have version 1 when they are saved.
TEST_CASE_METHOD(NoLeak, "parts of one storage with version counters of their own keep their own bytes") {
  expect_gradient_parity([](Inputs& in) {
    const at::Tensor arena = at::zeros({2, 8});
    at::Tensor first = arena.data().select(0, 0);
    at::Tensor second = arena.data().select(0, 1);
    first.fill_(2);
    const at::Tensor sum = in.activation({8}) * first;
    second.fill_(3);
    return sum + in.activation({8}) * second;
  });
}

TEST_CASE_METHOD(NoLeak, "saves of one storage through different views share one copy, and the counts say so") {
  Rig rig(late_without_stash());
  {
    Inputs in;
    at::Tensor sum;
    {
      const OffloadGuard guard(rig.offloader());
      const at::Tensor x = in.activation({8, 4});
      sum = x.narrow(0, 0, 4).pow(2).sum() + x.t().pow(2).sum() + x.select(0, 1).pow(2).sum();
    }
    const Stats saved = rig.stats();
    CHECK(saved.saved.tensors == 3);
    CHECK(saved.saved.bytes == 3 * 32 * kFloat);
    CHECK(saved.offloaded.tensors == 1);
    CHECK(saved.offloaded.bytes == 32 * kFloat);
    CHECK(saved.deduplicated.tensors == 2);
    CHECK(saved.deduplicated.bytes == 2 * 32 * kFloat);
    CHECK(saved.pool.now_bytes >= 32 * kFloat);
    CHECK(saved.saved_on_device.now_bytes == 0);
    sum.backward();
    CHECK(rig.stats().fetched.tensors == 1);
    CHECK(rig.stats().fetched.bytes == 32 * kFloat);
  }
}

TEST_CASE_METHOD(NoLeak, "a storage stays on the device until the last of its saves has asked for it, and no longer") {
  Rig rig(late_without_stash());
  Inputs in;
  at::Tensor first;
  at::Tensor second;
  {
    const OffloadGuard guard(rig.offloader());
    const at::Tensor x = in.activation({32});
    first = x.pow(2).sum();
    second = x.pow(3).sum();
  }
  first.backward({}, /*retain_graph=*/true);
  CHECK(rig.stats().saved_on_device.now_bytes == 32 * kFloat);
  second.backward({}, /*retain_graph=*/true);
  CHECK(rig.stats().saved_on_device.now_bytes == 0);
  CHECK(rig.stats().fetched.tensors == 1);
}

TEST_CASE_METHOD(NoLeak, "a storage does not stay on the device for a save that was dropped") {
  const bool drop_first = GENERATE(false, true);
  Rig rig(late_without_stash());
  Inputs in;
  at::Tensor asked;
  at::Tensor dropped;
  {
    const OffloadGuard guard(rig.offloader());
    const at::Tensor x = in.activation({32});
    asked = x.pow(2).sum();
    dropped = x.pow(3).sum();
  }
  if (drop_first) {
    dropped.reset();
  }
  asked.backward({}, /*retain_graph=*/true);
  dropped.reset();
  CHECK(rig.stats().saved_on_device.now_bytes == 0);
  CHECK(rig.stats().pool.now_bytes > 0);
}

TEST_CASE_METHOD(NoLeak, "a source that is still alive at backward is used, and nothing is copied") {
  const auto expected = plain([](const Run&) {
    Inputs in;
    in.activation({16, 16}).pow(2).sum().backward();
    return in.gradients();
  });
  Rig rig(late_without_stash());
  Inputs in;
  const at::Tensor x = in.activation({16, 16});
  at::Tensor loss;
  {
    const OffloadGuard guard(rig.offloader());
    loss = x.pow(2).sum();
  }
  CHECK(rig.stats().offloaded.tensors == 1);
  loss.backward();
  CHECK(rig.stats().reused.tensors == 1);
  CHECK(rig.stats().reused.bytes == 256 * kFloat);
  CHECK(rig.stats().fetched.tensors == 0);
  check_same(expected, {in.gradients(), ""});
}

}  // namespace
}  // namespace ebb

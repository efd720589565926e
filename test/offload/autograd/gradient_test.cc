// Gradients of single operations and small networks, bit for bit.

#include <array>

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <catch2/catch.hpp>

#include "test/offload/parity.h"

namespace ebb {
namespace {

TEST_CASE_METHOD(NoLeak, "a network of operations that save their own outputs keeps its gradients") {
  expect_gradient_parity([](Inputs& in) {
    at::Tensor x = in.activation({6, 10});
    for (int layer = 0; layer < 2; ++layer) {
      x = at::linear(x, in.leaf({10, 10}), in.leaf({10})).relu();
      x = at::linear(x, in.leaf({10, 10}), in.leaf({10})).sigmoid();
      x = at::linear(x, in.leaf({10, 10})).tanh().exp().softmax(1);
    }
    return at::log_softmax(x, 0);
  });
}

TEST_CASE_METHOD(NoLeak,
                 "an operation that saves its own output does not keep itself alive when backward never comes") {
  Rig rig(late_without_stash());
  {
    Inputs in;
    const OffloadGuard guard(rig.offloader());
    const at::Tensor out = in.activation({64}).exp().sigmoid().relu().softmax(0);
    const at::Tensor empty = in.activation({64}).pow(2).narrow(0, 0, 0).exp();  // a save that stays where it is
    CHECK(rig.stats().pool.now_bytes > 0);
  }
  CHECK(rig.stats().pool.now_bytes == 0);
}

TEST_CASE_METHOD(NoLeak, "convolution and batch norm keep their gradients") {
  expect_gradient_parity([](Inputs& in) {
    at::Tensor x = at::conv2d(in.activation({2, 3, 9, 7}), in.leaf({4, 3, 3, 3}), in.leaf({4}), 1, 1);
    const at::Tensor mean = at::zeros({4});
    const at::Tensor variance = at::ones({4});
    x = at::batch_norm(x, in.leaf({4}), in.leaf({4}), mean, variance, /*training=*/true, 0.1, 1e-5, false).relu();
    return at::max_pool2d(x, {2, 2});
  });
}

TEST_CASE_METHOD(NoLeak, "channels-last activations keep their layout") {
  expect_gradient_parity([](Inputs& in) {
    const at::Tensor x = in.activation({2, 4, 5, 5}).contiguous(at::MemoryFormat::ChannelsLast);
    const at::Tensor weight = in.leaf({4, 4, 3, 3}).contiguous(at::MemoryFormat::ChannelsLast);
    return at::silu(at::conv2d(x.pow(2), weight, {}, 1, 1));
  });
}

TEST_CASE_METHOD(NoLeak, "scaled dot-product attention keeps its gradients") {
  const bool causal = GENERATE(false, true);
  expect_gradient_parity([causal](Inputs& in) {
    const at::Tensor query = in.activation({2, 8, 4, 16}).transpose(1, 2);
    const at::Tensor key = in.activation({2, 8, 2, 16}).transpose(1, 2);
    const at::Tensor value = in.activation({2, 8, 2, 16}).transpose(1, 2);
    return at::scaled_dot_product_attention(query, key, value, {}, 0.0, causal, std::nullopt, /*enable_gqa=*/true);
  });
}

TEST_CASE_METHOD(NoLeak, "layer norm, group norm and embedding keep their gradients") {
  expect_gradient_parity([](Inputs& in) {
    const at::Tensor tokens = at::arange(12).remainder(5).view({2, 6});
    at::Tensor x = at::embedding(in.leaf({5, 8}), tokens);
    x = at::gelu(at::layer_norm(x, {8}, in.leaf({8}), in.leaf({8})));
    return at::group_norm(x.transpose(1, 2), 2, in.leaf({8}), in.leaf({8}));
  });
}

TEST_CASE_METHOD(NoLeak, "integer and boolean saves come back with their types") {
  expect_gradient_parity([](Inputs& in) {
    const at::Tensor x = in.activation({5, 7});
    const at::Tensor rows = at::arange(4) + 1;
    const at::Tensor columns = at::arange(35).view({5, 7}).remainder(7).to(at::kLong);
    const at::Tensor mask = x.detach() > 0.3;
    at::Tensor out = x.gather(1, columns) * x.index_select(0, rows.remainder(5)).sum();
    out = at::where(mask, out * out, out.sin());
    out = out.masked_fill(mask.logical_not(), 0.25).cumsum(1).index({rows});
    return at::cat({out, std::get<0>(x.sort(1)), std::get<0>(x.topk(7, 1)).square()});
  });
}

TEST_CASE_METHOD(NoLeak, "dropout replays the same mask") {
  expect_gradient_parity([](Inputs& in) {
    const at::Tensor mask = in.constant({11, 3}) > 0;
    return in.activation({11, 3}).mul(mask).pow(3);
  });
}

TEST_CASE_METHOD(NoLeak, "every floating-point type keeps its bits") {
  const at::ScalarType dtype = GENERATE(at::kBFloat16, at::kHalf, at::kFloat, at::kDouble);
  expect_gradient_parity([dtype](Inputs& in) {
    const at::Tensor x = at::silu(at::mm(in.activation({7, 13}, dtype), in.leaf({13, 5}, dtype)));
    return at::layer_norm(x, {5}) * x;
  });
}

TEST_CASE_METHOD(NoLeak, "complex tensors, their conjugates and negative views come back as they were") {
  expect_gradient_parity([](Inputs& in) {
    const at::Tensor x = in.activation({4, 6}, at::kComplexFloat);
    const at::Tensor y = in.activation({6, 4}, at::kComplexFloat);
    const at::Tensor imaginary_of_conjugate = at::imag(x.conj());
    return at::mm(x.conj() * x, y.conj()).sum() + (imaginary_of_conjugate * imaginary_of_conjugate).sum();
  });
}

TEST_CASE_METHOD(NoLeak, "tensors without dimensions and with odd sizes come back") {
  const auto sizes =
      GENERATE(std::vector<std::int64_t>{}, std::vector<std::int64_t>{1}, std::vector<std::int64_t>{3, 1, 5},
               std::vector<std::int64_t>{1021}, std::vector<std::int64_t>{1025});
  expect_gradient_parity([&](Inputs& in) { return in.activation(sizes).pow(2).exp().add(1).log(); });
}

TEST_CASE_METHOD(NoLeak, "empty tensors pass through beside others that move") {
  expect_gradient_parity([](Inputs& in) {
    const at::Tensor none = in.activation({0, 4});
    return at::cat({none.pow(2), in.activation({3, 4}).pow(2)}).exp();
  });
}

TEST_CASE_METHOD(NoLeak, "recurrent use of one weight keeps its gradient") {
  expect_gradient_parity([](Inputs& in) {
    const at::Tensor weight = in.leaf({8, 8});
    at::Tensor state = in.activation({3, 8});
    for (int step = 0; step < 6; ++step) {
      state = at::tanh(at::linear(state, weight) + state);
    }
    return state;
  });
}

}  // namespace
}  // namespace ebb

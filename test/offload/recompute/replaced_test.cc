// Tensors that are given other data between forward and backward (set_data: an average of the weights swapped in,
// sharded parameters), and storages that are resized: no version tells of either.

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/native/Resize.h>
#include <catch2/catch.hpp>
#include <torch/csrc/autograd/autograd.h>

#include "policy/policies.h"
#include "test/offload/parity.h"

namespace ebb {
namespace {

std::vector<Setting> with_recipes() {
  std::vector<Setting> settings = all_settings();
  settings.push_back(late());
  settings.back().name = "recomputed";
  settings.back().options.policy = recompute();
  return settings;
}

enum class Operand : std::uint8_t { kParameter, kView, kActivation };

TEST_CASE_METHOD(NoLeak, "what was computed from a tensor that got other data since is what it was") {
  const Operand what = GENERATE(Operand::kParameter, Operand::kView, Operand::kActivation);
  const bool matrix = GENERATE(false, true);
  CAPTURE(static_cast<int>(what), matrix);
  for (const Setting& setting : with_recipes()) {
    expect_parity(
        [=](const Run& run) {
          Inputs in;
          at::Tensor weight = what == Operand::kActivation ? in.activation({16, 16}) : in.leaf({16, 16});
          at::Tensor loss;
          {
            const auto guard = run.guard();
            const at::Tensor x = in.activation({16, 16});
            const at::Tensor operand = what == Operand::kView ? weight.t() : weight;
            const at::Tensor product = matrix ? at::mm(x, operand) : x * operand;
            loss = product.sin().sum();  // saves the product
          }
          weight.set_data(in.constant({16, 16}));
          loss.backward();
          return in.gradients();
        },
        setting);
  }
}

TEST_CASE_METHOD(NoLeak, "also if it got them before the product was saved") {
  for (const Setting& setting : with_recipes()) {
    expect_parity(
        [=](const Run& run) {
          Inputs in;
          at::Tensor weight = in.leaf({16, 16});
          at::Tensor loss;
          {
            const auto guard = run.guard();
            const at::Tensor product = in.activation({16, 16}) * weight;
            weight.set_data(in.constant({16, 16}));
            loss = product.sin().sum();
          }
          loss.backward();
          return in.gradients();
        },
        setting);
  }
}

TEST_CASE_METHOD(NoLeak, "also if the product was made outside of the guard") {
  for (const Setting& setting : with_recipes()) {
    expect_parity(
        [=](const Run& run) {
          Inputs in;
          at::Tensor weight = in.leaf({16, 16});
          const at::Tensor product = in.activation({16, 16}) * weight;
          weight.set_data(in.constant({16, 16}));
          at::Tensor loss;
          {
            const auto guard = run.guard();
            loss = product.sin().sum();
          }
          loss.backward();
          return in.gradients();
        },
        setting);
  }
}

TEST_CASE_METHOD(NoLeak, "a recipe whose input was resized is one clear error, and nothing is lost") {
  Setting setting = late();
  setting.options.policy = recompute();
  Rig rig(setting);
  static_cast<void>(counted(rig, [](Inputs& in) {
    return (in.activation({16, 16}) * in.leaf({16, 16})).sin();
  }));  // proves the recipe
  Inputs in;
  const at::Tensor weight = in.leaf({16, 16});
  at::Tensor product;
  at::Tensor loss;
  {
    const OffloadGuard guard(rig.offloader());
    const at::Tensor x = in.activation({16, 16});
    product = x * weight;
    loss = product.sin().sum();
    product.reset();
  }
  REQUIRE(rig.stats().dropped.tensors >= 1);
  const at::Tensor bytes = weight.detach().clone();
  weight.storage().unsafeGetStorageImpl()->set_nbytes(0);
  CHECK_THROWS_WITH(loss.backward({}, /*retain_graph=*/true),
                    Catch::Contains("recomputed") && Catch::Contains("resized or replaced"));
  forget_failed_backward();
  weight.storage().unsafeGetStorageImpl()->set_nbytes(bytes.nbytes());
  loss.backward();
  Inputs same;
  const at::Tensor other = same.leaf({16, 16});
  (same.activation({16, 16}) * other).sin().sum().backward();
  CHECK(in.gradients()[0].equal(same.gradients()[0]));
}

// A storage that gave its memory back and has other memory and other values by the time of backward, in which no
// version counter moved.
TEST_CASE_METHOD(NoLeak, "a saved storage that got new memory is read there, as plain autograd reads it") {
  for (const Setting& setting : all_settings()) {
    expect_parity(
        [](const Run& run) {
          Inputs in;
          at::Tensor saved;
          at::Tensor loss;
          {
            const auto guard = run.guard();
            saved = in.activation({16, 16});
            loss = (saved * saved).sum();
          }
          if (run.offloader() != nullptr) {
            run.offloader()->drain();  // no copy may read the memory that is given back
          }
          c10::StorageImpl* const storage = saved.storage().unsafeGetStorageImpl();
          const std::size_t bytes = storage->nbytes();
          const void* const before = storage->data();
          at::native::resize_bytes_cpu(storage, 0);
          const at::Tensor taken = at::empty({16, 16});  // likely where it was
          at::native::resize_bytes_cpu(storage, bytes);
          CHECK(storage->data() != before);
          saved.variable_data().fill_(3);
          loss.backward();
          return in.gradients();
        },
        setting);
  }
}

TEST_CASE_METHOD(NoLeak, "what was computed from a storage that got new memory is what it was, or one error") {
  const bool asked_before = GENERATE(false, true);
  for (const Setting& setting : with_recipes()) {
    CAPTURE(setting.name, asked_before);
    const auto gradient = [&](Offloader* offloader) {
      Inputs in;
      const Run run(offloader);
      const at::Tensor weight = in.leaf({16, 16});
      at::Tensor x;
      at::Tensor loss;
      at::Tensor other_loss;
      {
        const auto guard = run.guard();
        x = in.activation({16, 16}).matmul(in.leaf({16, 16}));
        loss = (at::silu(x) * weight).sum();  // saves x, and what is computed from it
        other_loss = (x * weight).sum();
      }
      if (offloader != nullptr) {
        offloader->drain();
      }
      c10::StorageImpl* const storage = x.storage().unsafeGetStorageImpl();
      const std::size_t bytes = storage->nbytes();
      at::native::resize_bytes_cpu(storage, 0);
      const at::Tensor taken = at::empty({16, 16});
      at::native::resize_bytes_cpu(storage, bytes);
      x.variable_data().fill_(3);
      if (asked_before) {
        static_cast<void>(torch::autograd::grad({other_loss}, {weight}));
      }
      return torch::autograd::grad({loss}, {weight})[0];
    };
    const at::Tensor expected = gradient(nullptr);
    Rig rig(setting);
    try {
      CHECK(gradient(&rig.offloader()).equal(expected));
    } catch (const c10::Error& error) {
      CHECK_THAT(error.what_without_backtrace(), Catch::Contains("resized or replaced"));
      forget_failed_backward();
    }
  }
}

// Five steps over two weights, of which the first has no memory from the forward pass on until backward comes to it, as
// FSDP does with parameters. Under a budget all that can be recomputed is.
Tensors train_sharded(const Run& run) {
  if (run.offloader() != nullptr) {
    run.offloader()->parameters_may_be_sharded();
  }
  Inputs in;
  const at::Tensor first = in.leaf({16, 16});
  const at::Tensor second = in.leaf({16, 16});
  for (int step = 0; step < 5; ++step) {
    at::Tensor loss;
    at::Tensor bytes;
    {
      const auto guard = run.guard();
      const at::Tensor hidden = in.activation({16, 16}).mm(first);
      hidden.register_hook([&](const at::Tensor& gradient) {
        const at::NoGradGuard no_grad;
        at::native::resize_bytes_cpu(first.storage().unsafeGetStorageImpl(), bytes.nbytes());
        first.variable_data().copy_(bytes);
        return gradient;
      });
      loss = hidden.mm(second).sin().sum();
      bytes = first.detach().clone();
      at::native::resize_bytes_cpu(first.storage().unsafeGetStorageImpl(), 0);
    }
    loss.backward();
  }
  return in.gradients();
}

Setting with_least_memory() {
  Setting setting = late_without_stash();
  setting.options.policy = nullptr;
  setting.options.device_budget = LeastMemory{};
  setting.options.planned_minimum_bytes = 1;
  setting.options.stash_bytes.reset();
  setting.options.window_bytes.reset();
  return setting;
}

TEST_CASE_METHOD(NoLeak, "under a budget nothing is computed again from a parameter whose memory comes and goes") {
  expect_parity(train_sharded, with_least_memory());
}

TEST_CASE_METHOD(NoLeak, "where parameters may be sharded, those that stay are computed from") {
  Rig rig(with_least_memory());
  rig.offloader().parameters_may_be_sharded();
  Inputs in;
  const at::Tensor weight = in.leaf({16, 16});
  for (int step = 0; step < 8; ++step) {
    at::Tensor loss;
    {
      const OffloadGuard guard(rig.offloader());
      loss = in.activation({16, 16}).mm(weight).sin().sum();
    }
    loss.backward();
  }
  CHECK(rig.stats().recomputed.tensors > 0);
}

}  // namespace
}  // namespace ebb

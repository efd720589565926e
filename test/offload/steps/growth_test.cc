// What a save costs must not depend on what else is alive, nor on how many came before.

#include <malloc.h>

#include <cstdint>
#include <functional>
#include <memory>

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <catch2/catch.hpp>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>

#include "test/offload/parity.h"
#include "test/offload/plans/planning_rig.h"

namespace ebb {
namespace {

using torch::autograd::grad;

std::uint64_t heap_bytes() { return mallinfo2().uordblks; }

// How much the heap has grown over the last three quarters of `steps` calls.
std::int64_t growth(int steps, const std::function<void()>& step) {
  for (int i = 0; i < steps / 4; ++i) {
    step();
  }
  const auto before = static_cast<std::int64_t>(heap_bytes());
  for (int i = steps / 4; i < steps; ++i) {
    step();
  }
  return static_cast<std::int64_t>(heap_bytes()) - before;
}

constexpr std::int64_t kLittle = 64 << 10;

struct AsksOften : torch::autograd::Function<AsksOften> {
  static std::int64_t*& grown() {
    static std::int64_t* bytes = nullptr;
    return bytes;
  }
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x) {
    context->save_for_backward({x});
    return x * 2;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& gradients) {
    *grown() = growth(20000, [context] { static_cast<void>(context->get_saved_variables()); });
    return {gradients[0] * 2};
  }
};

TEST_CASE_METHOD(NoLeak, "forward passes that are dropped leave nothing behind while one save lives on") {
  Rig rig(late_without_stash());
  Inputs in;
  const at::Tensor x = in.activation({32});
  const OffloadGuard guard(rig.offloader());
  const at::Tensor held = x.sin();
  CHECK(growth(20000, [&] { static_cast<void>(x.cos().sin()); }) < kLittle);
  held.sum().backward();
}

TEST_CASE_METHOD(NoLeak, "derivatives of derivatives leave nothing behind while their graph lives on") {
  Rig rig(late_without_stash());
  Inputs in;
  const at::Tensor x = in.activation({32});
  const OffloadGuard guard(rig.offloader());
  const at::Tensor loss = x.sin().cos().sum();
  const auto derive = [&] { static_cast<void>(grad({loss}, {x}, {}, /*retain_graph=*/true, /*create_graph=*/true)); };
  CHECK(growth(4000, derive) < kLittle);
  loss.backward();
}

TEST_CASE_METHOD(NoLeak, "nor with a budget, whose steps are recorded") {
  Rig rig(planned(DeviceBytes{64 << 20}));
  Inputs in;
  const at::Tensor x = in.activation({64, 64});
  const OffloadGuard guard(rig.offloader());
  const at::Tensor held = x.sin();
  // A step of so many storages is not planned any more.
  CHECK(growth(80000, [&] { static_cast<void>(x.cos().sin()); }) < kLittle);
  held.sum().backward();
}

TEST_CASE_METHOD(NoLeak, "other graphs' backward passes leave nothing behind in the record of a step that lives on") {
  Rig rig(planned(DeviceBytes{64 << 20}));
  Inputs in;
  const at::Tensor x = in.activation({64, 64});
  at::Tensor held;
  {
    const OffloadGuard guard(rig.offloader());
    held = x.sin().cos().sum();
  }
  const at::Tensor weight = in.leaf({4});
  CHECK(growth(20000, [&] { static_cast<void>(grad({(weight * weight).sum()}, {weight})); }) < kLittle);
  held.backward();
}

TEST_CASE_METHOD(NoLeak, "guards each of which is made before the last one ends leave nothing behind") {
  Rig rig(late_without_stash());
  auto guard = std::make_unique<OffloadGuard>(rig.offloader());
  CHECK(growth(20000, [&] { guard = std::make_unique<OffloadGuard>(rig.offloader()); }) < kLittle);
  Inputs in;
  const at::Tensor loss = in.activation({32}).sin().sum();
  CHECK(rig.stats().saved.tensors > 0);
  guard.reset();
  loss.backward();
}

TEST_CASE_METHOD(NoLeak, "a node that asks for its saves without end is not lent memory without end") {
  Rig rig(late_without_stash());
  Inputs in;
  const OffloadGuard guard(rig.offloader());
  std::int64_t grown = 0;
  AsksOften::grown() = &grown;
  AsksOften::apply(in.activation({32})).sum().backward();
  CHECK(grown < 1 << 20);  // 400 bytes each time would be 8 MB
}

}  // namespace
}  // namespace ebb

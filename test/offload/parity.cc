#include "test/offload/parity.h"

#include <cstring>
#include <regex>
#include <stdexcept>
#include <thread>
#include <utility>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Functions.h>
#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>
#include <catch2/catch.hpp>

#include "test/random/ready_queue.h"
#include "test/simulated/simulated_device_allocator.h"

namespace ebb {
namespace {

// Never destroyed: tensors of static lifetime may outlive it.
SimulatedDeviceAllocator& device_memory() {
  static auto* const allocator = [] {
    auto* const made = new SimulatedDeviceAllocator;
    c10::SetCPUAllocator(made, /*priority=*/255);
    return made;
  }();
  return *allocator;
}

[[maybe_unused]] const SimulatedDeviceAllocator& installed = device_memory();

bool same_bits(const at::Tensor& a, const at::Tensor& b) {
  if (!a.defined() || !b.defined()) {
    return a.defined() == b.defined();
  }
  if (a.dtype() != b.dtype() || a.sizes() != b.sizes() || a.strides() != b.strides()) {
    return false;
  }
  const at::Tensor left = a.resolve_conj().resolve_neg().contiguous();
  const at::Tensor right = b.resolve_conj().resolve_neg().contiguous();
  return left.nbytes() == 0 || std::memcmp(left.const_data_ptr(), right.const_data_ptr(), left.nbytes()) == 0;
}

std::string without_producer(const std::string& error) {
  static const std::regex producer(", which is output [0-9]+ of [A-Za-z0-9]+,");
  return std::regex_replace(error, producer, "");
}

void check_finite(const Outcome& outcome) {
  for (const at::Tensor& tensor : outcome.tensors) {
    CHECK((!tensor.defined() || at::isfinite(tensor).all().item<bool>()));
  }
}

void run_twice(const Program& program, const Outcome& expected, Rig& rig) {
  for (int pass = 0; pass < 2; ++pass) {  // the second one knows the sizes and the order
    INFO("pass " << pass);
    check_same(expected, outcome(program, Run(&rig.offloader())));
    rig.check_empty();
  }
}

}  // namespace

void forget_failed_backward() { graphs::empty_ready_queue(); }

Outcome outcome(const Program& program, const Run& run) {
  Outcome outcome;
  try {
    outcome.tensors = program(run);
    return outcome;
  } catch (const c10::Error& error) {
    outcome.error = error.what_without_backtrace();
  } catch (const std::exception& error) {
    outcome.error = error.what();
  }
  forget_failed_backward();
  return outcome;
}

void check_same(const Outcome& expected, const Outcome& found) {
  CHECK(found.error == expected.error);
  REQUIRE(found.tensors.size() == expected.tensors.size());
  for (std::size_t i = 0; i < expected.tensors.size(); ++i) {
    INFO("result " << i);
    CHECK(same_bits(expected.tensors[i], found.tensors[i]));
  }
}

void expect_parity(const Program& program, const Setting& setting) {
  INFO(setting.name);
  const Outcome expected = plain(program);
  REQUIRE(expected.error.empty());
  check_finite(expected);
  Rig rig(setting);
  run_twice(program, expected, rig);
}

void expect_parity(const Program& program) {
  for (const Setting& setting : all_settings()) {
    expect_parity(program, setting);
  }
}

void expect_same_error(const Program& program, const std::string& part, Words words) {
  const Program relevant = [&](const Run& run) -> Tensors {
    const Outcome found = outcome(program, run);
    throw std::runtime_error(words == Words::kAll ? found.error : without_producer(found.error));
  };
  const Outcome expected = plain(relevant);
  REQUIRE_THAT(expected.error, Catch::Contains(part));
  for (const Setting& setting : all_settings()) {
    INFO(setting.name);
    Rig rig(setting);
    run_twice(relevant, expected, rig);
  }
}

Inputs::Inputs() : random_(at::detail::createCPUGenerator(/*seed_val=*/7)) {}

at::Tensor Inputs::constant(at::IntArrayRef sizes, at::ScalarType dtype) {
  return at::randn(sizes, random_, at::TensorOptions(dtype));
}

at::Tensor Inputs::leaf(at::IntArrayRef sizes, at::ScalarType dtype) {
  leaves_.push_back(constant(sizes, dtype).requires_grad_());
  return leaves_.back();
}

at::Tensor Inputs::activation(at::IntArrayRef sizes, at::ScalarType dtype) { return leaf(sizes, dtype) * 1.5; }

at::Tensor Inputs::loss(const at::Tensor& tensor) {
  const at::Tensor real = tensor.is_complex() ? at::view_as_real(tensor.resolve_conj()) : tensor;
  return (real * constant(real.sizes(), real.scalar_type())).sum();
}

Tensors Inputs::gradients() const {
  Tensors gradients;
  for (const at::Tensor& leaf : leaves_) {
    gradients.push_back(leaf.grad());
  }
  return gradients;
}

Program train(Forward forward, bool backward_in_guard) {
  return [forward = std::move(forward), backward_in_guard](const Run& run) {
    Inputs inputs;
    std::unique_ptr<OffloadGuard> guard = run.guard();
    at::Tensor out = forward(inputs);
    Tensors results{out.detach().clone()};
    const at::Tensor loss = inputs.loss(out);
    out.reset();  // or backward would find it still on the device
    if (!backward_in_guard) {
      guard.reset();
    }
    loss.backward();
    for (at::Tensor& gradient : inputs.gradients()) {
      results.push_back(std::move(gradient));
    }
    return results;
  };
}

void expect_gradient_parity(const Forward& forward) {
  expect_parity(train(forward, true));
  expect_parity(train(forward, false));
  Rig rig(late_without_stash());
  (void)outcome(train(forward, false), Run(&rig.offloader()));
  CHECK(rig.stats().offloaded.tensors > 0);
  CHECK(rig.stats().fetched.tensors == rig.stats().offloaded.tensors);
}

Stats counted(Rig& rig, const Forward& forward) {
  Inputs in;
  at::Tensor loss;
  {
    const OffloadGuard guard(rig.offloader());
    loss = forward(in).sum();
  }
  loss.backward();
  return rig.stats();
}

NoLeak::NoLeak() : bytes_before_(device_memory().bytes().now) {}

// A thread of LibTorch's own (a backward within a backward runs on those) may let go of its last gradient only after
// backward has returned. That is waited for, though not for ever: what has leaked never goes.
NoLeak::~NoLeak() {
  constexpr int kMostTurns = 1'000'000;
  for (int turn = 0; turn < kMostTurns && device_memory().bytes().now != bytes_before_; ++turn) {
    std::this_thread::yield();
  }
  CHECK(device_memory().bytes().now == bytes_before_);
}

}  // namespace ebb

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

#include "policy/everything.h"
#include "policy/minimum_size.h"
#include "streams/simulated_device_allocator.h"

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

Setting simulated(std::string name, Schedule schedule, std::uint64_t seed = 0) {
  Setting setting;
  setting.name = std::move(name);
  setting.options.policy = offload_everything();
  setting.schedule = schedule;
  setting.seed = seed;
  return setting;
}

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

// After an error, autograd's queue of this thread still holds the nodes that were ready to run. The next backward drops
// them.
void forget_failed_backward() { at::ones({}).requires_grad_().mul(2).backward(); }

void run_twice(const Program& program, const Outcome& expected, Rig& rig) {
  for (int pass = 0; pass < 2; ++pass) {  // the second one knows the sizes and the order
    INFO("pass " << pass);
    check_same(expected, outcome(program, Run(&rig.offloader())));
    rig.check_empty();
  }
}

}  // namespace

Setting late() { return simulated("late", Schedule::kLate); }

Setting late_without_stash() {
  Setting setting = simulated("late, no stash", Schedule::kLate);
  setting.options.stash_bytes = 1;
  return setting;
}

Setting disk() {
  Setting setting;
  setting.name = "disk";
  setting.options.policy = offload_everything();
  setting.options.device = c10::Device(c10::kCPU);
  setting.options.stash_bytes = 1;
  return setting;
}

std::vector<Setting> all_settings() {
  std::vector<Setting> settings{late(), late_without_stash(), disk(), simulated("early", Schedule::kEarly)};
  for (const std::uint64_t seed : {1, 2, 3}) {
    settings.push_back(simulated("random " + std::to_string(seed), Schedule::kRandom, seed));
  }
  settings.push_back(simulated("early, no stash, tiny window", Schedule::kEarly));
  settings.back().options.stash_bytes = 1;
  settings.back().options.window_bytes = 64 << 10;
  settings.push_back(simulated("late, little room", Schedule::kLate));
  settings.back().options.capacity_bytes = 4 << 10;
  settings.push_back(simulated("random, 64 bytes or more", Schedule::kRandom, 4));
  settings.back().options.policy = minimum_size(64);
  settings.push_back(disk());
  settings.back().name = "disk by threads, with a stash";
  settings.back().options.disk_io = DiskIo::kThreads;
  settings.back().options.stash_bytes.reset();
  return settings;
}

Rig::Rig(const Setting& setting) {
  if (setting.schedule) {
    simulated_ = std::make_shared<SimulatedTier>(*setting.schedule, setting.seed, setting.options.capacity_bytes,
                                                 /*deferred_compute=*/false);
    offloader_ = std::make_unique<Offloader>(setting.options, simulated_);
  } else {
    offloader_ = std::make_unique<Offloader>(setting.options);
  }
}

Rig::~Rig() {
  check_empty();
  if (simulated_ != nullptr) {
    CHECK(simulated_->device_bytes().now == 0);
  }
}

void Rig::check_empty() {
  const auto drain = [this] {
    try {
      offloader_->drain();
    } catch (const std::exception&) {  // a copy that was made to fail
      offloader_->drain();
    }
    return offloader_->stats();
  };
  Stats stats = drain();
  const auto empty = [&stats] {
    return stats.pool.now_bytes + stats.stash.now_bytes + stats.window.now_bytes + stats.saved_on_device.now_bytes == 0;
  };
  // A thread of LibTorch's own may let go of a graph only after backward has returned or thrown; see ~NoLeak.
  constexpr int kMostTurns = 200'000;
  for (int turn = 0; turn < kMostTurns && !empty(); ++turn) {
    std::this_thread::yield();
    stats = drain();
  }
  CHECK(stats.pool.now_bytes == 0);
  CHECK(stats.stash.now_bytes == 0);
  CHECK(stats.window.now_bytes == 0);
  CHECK(stats.saved_on_device.now_bytes == 0);
}

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

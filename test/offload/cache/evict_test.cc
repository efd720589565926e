// What the policy keeps is moved all the same when the device has no memory left. The device is simulated: the
// allocator of this binary's CPU tensors has a limit, and asks as LibTorch's CUDA allocator does.

#include <atomic>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <c10/core/CPUAllocator.h>
#include <torch/csrc/autograd/autograd.h>

#include <catch2/catch.hpp>

#include "offload/saving/out_of_memory.h"
#include "policy/policies.h"
#include "test/offload/on_threads.h"
#include "test/offload/parity.h"
#include "test/offload/printed.h"
#include "test/simulated/simulated_device_allocator.h"

namespace ebb {
namespace {

using Catch::Contains;

constexpr std::int64_t kRows = 128;
constexpr std::uint64_t kMatrix = kRows * kRows * sizeof(float);
constexpr int kLayers = 12;

SimulatedDeviceAllocator& device() { return dynamic_cast<SimulatedDeviceAllocator&>(*c10::GetCPUAllocator()); }

// A device of limited memory, while it lives, which asks `offloader` for more.
class FullDevice {
 public:
  FullDevice(std::uint64_t bytes, Offloader& offloader) {
    device().reset_peak();
    device().limit(SimulatedDeviceAllocator::Limit{bytes, [this, &offloader](std::uint64_t missing) {
                                                     ++asked_;
                                                     return offloader.evict(missing) > 0;
                                                   }});
  }
  ~FullDevice() { device().limit(std::nullopt); }
  FullDevice(const FullDevice&) = delete;
  FullDevice& operator=(const FullDevice&) = delete;

  [[nodiscard]] int asked() const { return asked_; }

 private:
  std::atomic<int> asked_{0};
};

Setting keeping(Setting setting) {
  setting.name += ", all kept";
  setting.options.policy = keep_everything(kMatrix);
  return setting;
}

// What it saves is most of what it takes: all layers share a weight.
at::Tensor network(Inputs& in) {
  at::Tensor x = in.activation({kRows, kRows});
  const at::Tensor weight = in.leaf({kRows, kRows});
  for (int i = 0; i < kLayers; ++i) {
    x = at::tanh(x.matmul(weight) * 0.5);
  }
  return in.loss(x);
}

Tensors step(Offloader* offloader) {
  Inputs in;
  const Run run(offloader);
  const auto guard = run.guard();
  network(in).backward();
  return in.gradients();
}

// The most that a plain step adds to what the device holds before it.
std::uint64_t plain_peak() {
  device().reset_peak();
  const std::uint64_t before = device().bytes().now;
  step(nullptr);
  return device().bytes().peak - before;
}

// A device with so much of a plain step's memory.
std::uint64_t room_for(double share) {
  return device().bytes().now + static_cast<std::uint64_t>(share * static_cast<double>(plain_peak()));
}

TEST_CASE_METHOD(NoLeak, "a step that does not fit evicts what was kept, and has plain autograd's gradients") {
  const Tensors expected = step(nullptr);
  const double share = GENERATE(0.99, 0.8);
  for (const Setting& base : some_settings()) {
    CAPTURE(base.name, share);
    Rig rig(keeping(base));
    const std::uint64_t room = room_for(share);
    const FullDevice full(room, rig.offloader());
    for (int i = 0; i < 3; ++i) {
      check_same({expected, ""}, {step(&rig.offloader()), ""});
      CHECK(rig.stats().evicted.tensors > 0);
      CHECK(rig.stats().evicted.bytes == rig.stats().evicted.tensors * kMatrix);
    }
    CHECK(rig.stats().offloaded.tensors == 0);
    CHECK(device().bytes().peak <= room);
  }
}

TEST_CASE_METHOD(NoLeak, "a copy ahead that finds no room neither evicts nor gives up what is needed sooner") {
  constexpr int kCount = 8;
  Setting setting = disk();
  setting.options.window_bytes = kCount * kMatrix;
  Rig rig(setting);
  const auto step = [&](bool limited) {
    Inputs in;
    at::Tensor x = in.activation({kRows, kRows});
    {
      const OffloadGuard guard(rig.offloader());
      for (int i = 0; i < kCount; ++i) {
        x = x.sin();
      }
    }
    rig.offloader().drain();
    rig.offloader().reset_stats();
    at::Tensor gradient = at::ones({kRows, kRows});
    std::optional<FullDevice> full;
    if (limited) {  // backward has two gradients and the storage it works on, and the rest is for copies ahead
      full.emplace(device().bytes().now + 5 * kMatrix + 8 * 4096, rig.offloader());
    }
    x.backward(gradient);
    // One copy ahead is given up before it is known that the device is full.
    CHECK(rig.stats().fetched.tensors <= kCount + (limited ? 2 : 0));
    CHECK(rig.stats().evicted.tensors == 0);
    return full ? full->asked() : 0;
  };
  step(false);  // in which the order is learned
  step(false);
  CHECK(step(true) > 0);
}

TEST_CASE_METHOD(NoLeak, "without need nothing is evicted") {
  Rig rig(keeping(disk()));
  const FullDevice full(room_for(1.1), rig.offloader());
  step(&rig.offloader());
  CHECK(full.asked() == 0);
  CHECK(rig.stats().evicted.tensors == 0);
  CHECK(rig.stats().fetched.tensors == 0);
}

TEST_CASE_METHOD(NoLeak, "a step that does not fit fails as in plain autograd where eviction is switched off") {
  Setting setting = keeping(disk());
  setting.options.evict_when_out_of_memory = false;
  Rig rig(setting);
  const FullDevice full(room_for(0.8), rig.offloader());
  CHECK_THROWS_AS(step(&rig.offloader()), c10::OutOfMemoryError);
  forget_failed_backward();
  CHECK(full.asked() > 0);
  CHECK(rig.stats().evicted.tensors == 0);
}

TEST_CASE_METHOD(NoLeak,
                 "a step that fits with nothing kept either fails with the allocator's error and leaves nothing") {
  Rig rig(keeping(disk()));
  {
    const FullDevice full(room_for(0.05), rig.offloader());
    CHECK_THROWS_AS(step(&rig.offloader()), c10::OutOfMemoryError);
    forget_failed_backward();
  }
  rig.check_empty();
}

// Whether somebody holds the memory of what was once this tensor's storage.
class Watched {
 public:
  explicit Watched(const at::Tensor& tensor) : storage_(tensor.storage().getWeakStorageImpl()) {}
  [[nodiscard]] bool alive() const { return !storage_.expired(); }

 private:
  c10::weak_intrusive_ptr<c10::StorageImpl> storage_;
};

TEST_CASE_METHOD(NoLeak, "those saved first are evicted first, and no more than it takes") {
  Rig rig(keeping(disk()));
  Inputs in;
  std::vector<Watched> saved;
  at::Tensor result;
  {
    const OffloadGuard guard(rig.offloader());
    at::Tensor x = in.activation({kRows, kRows});
    for (int i = 0; i < 4; ++i) {
      x = at::tanh(x);
      saved.emplace_back(x);
    }
    result = x * 2;
  }
  CHECK(rig.offloader().evict(kMatrix + 1) == 2 * kMatrix);
  CHECK_FALSE(saved[0].alive());
  CHECK_FALSE(saved[1].alive());
  CHECK(saved[2].alive());
  CHECK(saved[3].alive());
  CHECK(rig.stats().evicted.tensors == 2);
  CHECK(rig.stats().saved_on_device.now_bytes == 2 * kMatrix);
  CHECK(rig.offloader().evict(kUnlimited) == 2 * kMatrix);
  CHECK(rig.offloader().evict(kUnlimited) == 0);
  result.sum().backward();
  CHECK(rig.stats().fetched.tensors == 4);
}

TEST_CASE_METHOD(NoLeak, "before anything is evicted, what ebb can do without is given up") {
  Setting setting = late();  // copies that are never done of themselves
  setting.options.stash_bytes = std::uint64_t{1} << 30;
  Rig rig(setting);
  Inputs in;
  const OffloadGuard guard(rig.offloader());
  const at::Tensor loss = network(in);
  const std::uint64_t stashed = rig.stats().stash.now_bytes;
  CHECK(stashed > kMatrix);
  CHECK(rig.offloader().evict(1) == stashed);
  CHECK(rig.stats().stash.now_bytes == 0);
  CHECK(rig.stats().evicted.tensors == 0);
  loss.backward();
}

TEST_CASE_METHOD(NoLeak, "a step in which something is evicted is not measured any further") {
  int asked = 0;
  Setting setting = disk();
  setting.options.policy = nullptr;
  setting.options.stash_bytes.reset();
  setting.options.planned_minimum_bytes = kMatrix;
  setting.options.device_budget = DeviceBytes{kUnlimited};
  setting.options.device_meter = [&asked] {
    ++asked;
    return DeviceUse{};
  };
  Rig rig(setting);
  for (int i = 0; i < 3; ++i) {
    step(&rig.offloader());
  }
  const int before_step = asked;
  Inputs in;
  const OffloadGuard guard(rig.offloader());
  const at::Tensor loss = network(in);
  CHECK(asked > before_step);  // the second step that follows the plan
  CHECK(rig.offloader().evict(kMatrix) >= kMatrix);
  const int before_backward = asked;
  loss.backward();
  CHECK(asked == before_backward);
}

TEST_CASE_METHOD(NoLeak, "what somebody else holds stays, for nothing would be gained") {
  Rig rig(keeping(disk()));
  Inputs in;
  const OffloadGuard guard(rig.offloader());
  const at::Tensor held = at::tanh(in.activation({kRows, kRows}));
  const at::Tensor result = held * 2;
  CHECK(rig.offloader().evict(kUnlimited) == 0);
  CHECK(rig.stats().evicted.tensors == 0);
  result.sum().backward();
}

TEST_CASE_METHOD(NoLeak, "what is below the policy's least stays") {
  Rig rig(keeping(disk()));
  Inputs in;
  const OffloadGuard guard(rig.offloader());
  const at::Tensor result = at::tanh(in.activation({kRows, kRows / 2})) * 2;
  CHECK(rig.offloader().evict(kUnlimited) == 0);
  result.sum().backward();
}

TEST_CASE_METHOD(NoLeak, "where the tier has no room what was kept stays") {
  Setting setting = keeping(late());
  setting.options.capacity_bytes = kMatrix;
  const Tensors expected = step(nullptr);
  Rig rig(setting);
  const auto guard = guard_on(rig);
  Inputs in;
  const at::Tensor loss = network(in);
  CHECK(rig.offloader().evict(kUnlimited) == kMatrix);
  CHECK(rig.stats().evicted.tensors == 1);
  loss.backward();
  check_same({expected, ""}, {in.gradients(), ""});
}

TEST_CASE_METHOD(NoLeak, "what is evicted in backward comes back, also for a second backward over the graph") {
  const auto gradients = [](Offloader* offloader) {
    Inputs in;
    const Run run(offloader);
    Tensors all;
    const auto guard = run.guard();
    const at::Tensor first = in.leaf({kRows, kRows});
    at::Tensor x = first * 0.5;
    for (int i = 0; i < kLayers; ++i) {
      x = at::tanh(x);
      if (i == kLayers / 2) {
        x.register_hook([offloader](const at::Tensor& gradient) {
          if (offloader != nullptr) {
            CHECK(offloader->evict(3 * kMatrix) == 3 * kMatrix);
          }
          return gradient;
        });
      }
    }
    const at::Tensor loss = in.loss(x);
    for (const bool again : {true, false}) {
      all.push_back(torch::autograd::grad({loss}, {first}, {}, /*retain_graph=*/again)[0]);
    }
    return all;
  };
  const Tensors expected = gradients(nullptr);
  for (const Setting& base : some_settings()) {
    CAPTURE(base.name);
    Rig rig(keeping(base));
    check_same({expected, ""}, {gradients(&rig.offloader()), ""});
    CHECK(rig.stats().evicted.tensors == 6);
  }
}

TEST_CASE_METHOD(NoLeak, "what is evicted and written to afterwards raises plain autograd's error") {
  const auto program = [](const Run& run) -> Tensors {
    Inputs in;
    at::Tensor y = at::tanh(in.activation({kRows, kRows}));
    const at::Tensor view = y.detach();
    const auto guard = run.guard();
    const at::Tensor result = (y * y).sum();
    y.add_(1);
    if (run.offloader() != nullptr) {
      run.offloader()->evict(kUnlimited);
    }
    result.backward();
    return in.gradients();
  };
  const Outcome plain = outcome(program, Run(nullptr));
  CHECK_THAT(plain.error, Contains("modified by an inplace operation"));
  Rig rig(keeping(disk()));
  const Outcome found = outcome(program, Run(&rig.offloader()));
  CHECK_THAT(found.error, Contains("modified by an inplace operation"));
}

TEST_CASE_METHOD(NoLeak, "a plan that has counted too little memory is helped out") {
  const Tensors expected = step(nullptr);
  Setting setting = disk();
  setting.options.policy = nullptr;
  setting.options.stash_bytes.reset();
  setting.options.planned_minimum_bytes = kMatrix;
  setting.options.device_budget = DeviceBytes{kUnlimited};
  Rig rig(setting);
  const std::uint64_t room = room_for(0.8);
  for (int i = 0; i < 2; ++i) {
    step(&rig.offloader());
  }
  REQUIRE(rig.offloader().plan_report());
  const FullDevice full(room, rig.offloader());
  for (int i = 0; i < 3; ++i) {
    check_same({expected, ""}, {step(&rig.offloader()), ""});
  }
  CHECK(rig.stats().evicted.tensors > 0);
  CHECK_FALSE(rig.offloader().plan_report()->actual);  // a step with evictions is not measured
}

TEST_CASE_METHOD(NoLeak, "steps on several threads evict each other's storages") {
  const Tensors expected = step(nullptr);
  Rig rig(keeping(disk()));
  constexpr std::size_t kThreads = 4;
  std::vector<Tensors> found(kThreads);
  std::atomic<int> failed{0};
  {
    const FullDevice full(device().bytes().now + 2 * plain_peak(), rig.offloader());
    on_threads(kThreads, [&](std::size_t thread) {
      for (int i = 0; i < 5; ++i) {
        try {
          found[thread] = step(&rig.offloader());
        } catch (const c10::OutOfMemoryError&) {  // the others' need may be more than can be evicted
          ++failed;
        }
      }
    });
  }
  CHECK(rig.stats().evicted.tensors > 0);
  for (const Tensors& each : found) {
    if (!each.empty()) {
      check_same({expected, ""}, {each, ""});
    }
  }
  forget_failed_backward();
}

TEST_CASE_METHOD(NoLeak, "the first eviction is warned of, and no other") {
  Rig rig(keeping(disk()));
  Inputs in;
  const OffloadGuard guard(rig.offloader());
  const at::Tensor loss = network(in);
  Printed printed;
  rig.offloader().evict(1);
  rig.offloader().evict(1);
  const std::string text = printed.take();
  CHECK_THAT(text, Contains("no memory left") && Contains("device_budget"));
  CHECK(std::count(text.begin(), text.end(), '\n') == 1);
  loss.backward();
}

TEST_CASE("a device is short of what one request may want, in the allocator's units") {
  constexpr std::uint64_t kMiB = 1 << 20;
  CHECK(bytes_short(20 * kMiB, 0) == 0);
  CHECK(bytes_short(19 * kMiB, 0) == kMiB);
  CHECK(bytes_short(100 * kMiB, 99 * kMiB) == 0);
  CHECK(bytes_short(98 * kMiB, 97 * kMiB) == 0);
  CHECK(bytes_short(98 * kMiB, 98 * kMiB + 1) == 2 * kMiB);
  CHECK(bytes_short(0, 99 * kMiB) == 100 * kMiB);
}

}  // namespace
}  // namespace ebb

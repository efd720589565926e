// What is never moved, what the policy keeps, and what finds no room: each counted under its reason, and all exact.

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <catch2/catch.hpp>
#include <torch/nn/module.h>

#include "policy/policies.h"
#include "test/offload/parity.h"

namespace ebb {
namespace {

constexpr std::uint64_t kFloat = sizeof(float);

void check_kept(const Stats& stats, KeptReason reason, std::uint64_t tensors, std::uint64_t bytes) {
  INFO(to_string(reason));
  CHECK(stats.kept_for(reason).tensors == tensors);
  CHECK(stats.kept_for(reason).bytes == bytes);
}

TEST_CASE_METHOD(NoLeak, "parameters and transposed views of them stay, and nothing is copied for them") {
  Rig rig(late());
  const Stats stats = counted(rig, [](Inputs& in) {
    const at::Tensor weight = in.leaf({4, 6});
    const at::Tensor x = in.activation({3, 6});
    at::Tensor out = at::mm(x, weight.t());
    out = out + at::mm(x, weight.view({4, 6}).detach().t());  // known by then, though a detached view shows nothing
    return out + in.leaf({4}) * in.leaf({4});
  });
  check_kept(stats, KeptReason::kParameter, 1 + 1 + 2, (24 + 24 + 4 + 4) * kFloat);
  CHECK(stats.offloaded.tensors == 1);
  CHECK(stats.offloaded.bytes == 18 * kFloat);
}

struct WithBuffer : torch::nn::Module {
  WithBuffer() { buffer = register_buffer("buffer", at::full({8}, 2.0)); }
  at::Tensor buffer;
};

TEST_CASE_METHOD(NoLeak, "an excluded module's buffers, and views of excluded tensors, stay") {
  Rig rig(late());
  const WithBuffer module;
  const at::Tensor table = at::ones({4, 8});
  rig.offloader().exclude(module);
  rig.offloader().exclude(table.narrow(0, 0, 1));
  rig.offloader().exclude(at::Tensor());
  const Stats stats = counted(rig, [&](Inputs& in) {
    const at::Tensor x = in.activation({8});
    return x * module.buffer + x * table.select(0, 2) + x * at::ones({8});
  });
  check_kept(stats, KeptReason::kExcluded, 2, (8 + 32) * kFloat);
  CHECK(stats.offloaded.tensors == 1);
}

TEST_CASE_METHOD(NoLeak, "a tensor that gets an excluded tensor's address is not taken for it") {
  Rig rig(late());
  rig.offloader().exclude(at::ones({24}));  // gone at once: its memory is used again
  const Stats stats = counted(rig, [](Inputs& in) { return in.activation({24}) * at::ones({24}); });
  check_kept(stats, KeptReason::kExcluded, 0, 0);
  CHECK(stats.offloaded.tensors == 1);
}

TEST_CASE_METHOD(NoLeak, "tensors on another device stay") {
  Rig rig(late());
  {
    const OffloadGuard guard(rig.offloader());
    const at::Tensor x = at::ones({8}, at::TensorOptions(at::kMeta)).requires_grad_() * 2;
    const at::Tensor loss = x.pow(2).sum();
    check_kept(rig.stats(), KeptReason::kOtherDevice, 1, 8 * kFloat);
    loss.backward();
  }
  CHECK(rig.stats().offloaded.tensors == 0);
}

TEST_CASE_METHOD(NoLeak, "empty tensors stay") {
  Rig rig(late());
  const Stats stats = counted(rig, [](Inputs& in) { return in.activation({0, 3}).pow(2); });
  check_kept(stats, KeptReason::kEmpty, 1, 0);
  CHECK(stats.offloaded.tensors == 0);
}

TEST_CASE_METHOD(NoLeak, "sparse tensors stay") {
  Rig rig(late());
  const Forward forward = [](Inputs& in) {
    const at::Tensor sparse = at::eye(4).to_sparse();
    return at::mm(sparse, in.activation({4, 3}));
  };
  const Stats stats = counted(rig, forward);
  CHECK(stats.kept_for(KeptReason::kUnmovable).tensors == 1);
  expect_parity(train(forward, true));
}

TEST_CASE_METHOD(NoLeak, "memory that LibTorch does not own stays, and memory that is handed over moves") {
  Rig rig(late_without_stash());
  std::vector<float> values(16, 0.5F);
  int freed = 0;
  const Stats stats = counted(rig, [&](Inputs& in) {
    const at::Tensor foreign = at::from_blob(values.data(), {16});
    const at::Tensor owned = at::from_blob(values.data(), {16}, [&freed](void*) { ++freed; });
    return in.activation({16}) * foreign + in.activation({16}) * owned;
  });
  check_kept(stats, KeptReason::kNonOwning, 1, 16 * kFloat);
  CHECK(stats.offloaded.tensors == 1);
  CHECK(freed == 1);
}

TEST_CASE_METHOD(NoLeak, "what a policy keeps stays on the device until its save ends, and is counted once") {
  Setting setting = late();
  setting.options.policy = callback(
      [](const Candidate& candidate) { return candidate.bytes < 100 * kFloat ? Decision::kKeep : Decision::kOffload; });
  Rig rig(setting);
  Inputs in;
  {
    const OffloadGuard guard(rig.offloader());
    const at::Tensor small = in.activation({99});
    const at::Tensor loss = small.pow(2).sum() + small.pow(3).sum() + in.activation({100}).pow(2).sum();
    rig.offloader().drain();
    const Stats stats = rig.stats();
    check_kept(stats, KeptReason::kPolicy, 1, 99 * kFloat);
    CHECK(stats.deduplicated.tensors == 1);
    CHECK(stats.offloaded.tensors == 1);
    CHECK(stats.saved_on_device.now_bytes == 99 * kFloat);
  }
  CHECK(rig.stats().saved_on_device.now_bytes == 0);
}

// Says which is the smallest storage to ask about, and what it was asked about.
class PickyPolicy final : public Policy {
 public:
  explicit PickyPolicy(std::uint64_t least_bytes) : least_bytes_(least_bytes) {}
  void begin_step() override { ++steps; }
  [[nodiscard]] Decision decide(const Candidate& candidate) override {
    asked.push_back(candidate.bytes);
    return Decision::kOffload;
  }
  [[nodiscard]] bool needs_operation() const override { return false; }
  [[nodiscard]] std::uint64_t least_bytes() const override { return least_bytes_; }

  int steps = 0;
  std::vector<std::uint64_t> asked;

 private:
  const std::uint64_t least_bytes_;
};

TEST_CASE_METHOD(NoLeak, "a policy is not asked about storages below its least, which stay, counted once a save") {
  Setting setting = late();
  const auto policy = std::make_shared<PickyPolicy>(100 * kFloat);
  setting.options.policy = policy;
  Rig rig(setting);
  Inputs in;
  at::Tensor loss;
  {
    const OffloadGuard guard(rig.offloader());
    const at::Tensor small = in.activation({99});
    loss = small.pow(2).sum() + small.pow(3).sum() + in.activation({100}).pow(2).sum();
  }
  CHECK(policy->asked == std::vector<std::uint64_t>{100 * kFloat});
  CHECK(policy->steps == 1);
  rig.offloader().drain();
  const Stats stats = rig.stats();
  check_kept(stats, KeptReason::kPolicy, 2, 2 * 99 * kFloat);
  CHECK(stats.deduplicated.tensors == 0);
  CHECK(stats.offloaded.tensors == 1);
  CHECK(stats.saved_on_device.now_bytes == 2 * 99 * kFloat);
  loss.reset();
  CHECK(rig.stats().saved_on_device.now_bytes == 0);
}

TEST_CASE_METHOD(NoLeak, "a small save may outlive its offloader") {
  Setting setting = late();
  setting.options.policy = minimum_size(100 * kFloat);
  Inputs in;
  at::Tensor loss;
  {
    const auto offloader = make_offloader(setting, make_tier(setting));
    const OffloadGuard guard(*offloader);
    loss = in.activation({9}).pow(2).sum();
    CHECK(offloader->stats().saved_on_device.now_bytes == 9 * kFloat);
  }
  loss.backward();
}

TEST_CASE_METHOD(NoLeak, "only the outputs of the named operations move") {
  const Forward forward = [](Inputs& in) { return in.activation({12}).sin().exp().pow(2); };
  Setting setting = late();
  setting.options.policy = only_operations({"SinBackward0", "ExpBackward0"});
  expect_parity(train(forward, true), setting);
  Rig rig(setting);
  const Stats stats = counted(rig, forward);
  CHECK(stats.offloaded.tensors == 1);  // sin's output is not saved; exp saves its own, and pow shares it
  CHECK(stats.deduplicated.tensors == 1);
  check_kept(stats, KeptReason::kPolicy, 1, 12 * kFloat);
}

TEST_CASE_METHOD(NoLeak, "a callback sees each storage once, in order, with its size and operation") {
  const std::vector<std::string> kMakers{"MulBackward1", "SinBackward0", "TanhBackward0"};
  std::vector<Candidate> seen;
  std::vector<std::string> operations;
  Setting setting = late();
  setting.options.policy = callback([&](const Candidate& candidate) {
    seen.push_back(candidate);
    operations.emplace_back(candidate.operation);
    return candidate.ordinal == 1 ? Decision::kKeep : Decision::kOffload;
  });
  Rig rig(setting);
  for (int step = 0; step < 2; ++step) {
    seen.clear();
    operations.clear();
    (void)counted(rig, [](Inputs& in) { return in.activation({3, 4}).sin().pow(2).narrow(0, 0, 2).tanh(); });
    REQUIRE(seen.size() == 3);
    CHECK(operations == kMakers);
    for (std::uint64_t i = 0; i < 3; ++i) {
      CHECK(seen[i].ordinal == i);
      CHECK(seen[i].bytes == (i == 2 ? 8 : 12) * kFloat);
    }
  }
  CHECK(rig.stats().offloaded.tensors == 4);
  check_kept(rig.stats(), KeptReason::kPolicy, 2, 2 * 12 * kFloat);
}

TEST_CASE_METHOD(NoLeak, "storages that find no room stay on the device, are counted, and are exact") {
  const Forward forward = [](Inputs& in) {
    at::Tensor x = in.activation({32, 32});
    for (int i = 0; i < 6; ++i) {
      x = x.sin();
    }
    return x;
  };
  Setting setting = late();
  setting.options.capacity_bytes = 2 * 32 * 32 * kFloat;
  expect_parity(train(forward, true), setting);
  Rig rig(setting);
  const Stats stats = counted(rig, forward);
  CHECK(stats.offloaded.tensors == 2);
  check_kept(stats, KeptReason::kNoRoom, 4, 4 * 32 * 32 * kFloat);
  CHECK(stats.pool.peak_bytes == 2 * 32 * 32 * kFloat);
}

}  // namespace
}  // namespace ebb

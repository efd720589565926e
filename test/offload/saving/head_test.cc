// What is saved right before backward: kept by a plan, and otherwise the user is told.

#include <cstdint>
#include <string>

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <catch2/catch.hpp>

#include "policy/policies.h"
#include "test/offload/parity.h"
#include "test/offload/printed.h"

namespace ebb {
namespace {

using Catch::Contains;

constexpr std::int64_t kRows = 1024;
constexpr std::int64_t kHidden = 256;
constexpr std::int64_t kClasses = 8192;  // logits of 32 MiB

Setting at_least_a_quarter_mebibyte() {
  Setting setting = disk();
  setting.options.policy = minimum_size(1 << 18);
  return setting;
}

void train(Offloader& offloader, bool head_in_no_op_guard, std::int64_t classes = kClasses) {
  Inputs in;
  const OffloadGuard guard(offloader);
  at::Tensor x = in.activation({kRows, kHidden});
  for (int i = 0; i < 3; ++i) {
    x = at::tanh(x.matmul(in.leaf({kHidden, kHidden})));
  }
  std::optional<NoOpGuard> head;
  if (head_in_no_op_guard) {
    head.emplace();
  }
  at::logsumexp(x.matmul(in.leaf({kHidden, classes})), -1).mean().backward();
}

std::string printed_by(const Setting& setting, bool head_in_no_op_guard, std::int64_t classes = kClasses) {
  Rig rig(setting);
  Printed printed;
  for (int step = 0; step < 3; ++step) {
    train(rig.offloader(), head_in_no_op_guard, classes);
  }
  return printed.take();
}

TEST_CASE_METHOD(NoLeak, "a head that moves is warned of once") {
  const std::string text = printed_by(at_least_a_quarter_mebibyte(), /*head_in_no_op_guard=*/false);
  CHECK_THAT(text, Contains("NoOpGuard") && Contains("32.0 MiB"));
  CHECK(std::count(text.begin(), text.end(), '\n') == 1);
}

TEST_CASE_METHOD(NoLeak, "a head under a NoOpGuard is not warned of, nor a last save like the others") {
  CHECK(printed_by(at_least_a_quarter_mebibyte(), /*head_in_no_op_guard=*/true).empty());
  CHECK(printed_by(at_least_a_quarter_mebibyte(), /*head_in_no_op_guard=*/false, /*classes=*/2 * kHidden).empty());
}

TEST_CASE_METHOD(NoLeak, "a plan keeps the head without being told, where there is any room") {
  Setting setting = disk();
  setting.options.policy = nullptr;
  setting.options.stash_bytes.reset();
  setting.options.planned_minimum_bytes = 1 << 18;
  constexpr std::uint64_t kLogits = kRows * kClasses * sizeof(float);
  setting.options.device_budget = DeviceBytes{kLogits + (1 << 20)};  // of saved storages: there is no meter
  Rig rig(setting);
  for (int step = 0; step < 2; ++step) {
    train(rig.offloader(), /*head_in_no_op_guard=*/false);
  }
  const std::uint64_t before = rig.stats().offloaded.bytes;
  train(rig.offloader(), /*head_in_no_op_guard=*/false);
  REQUIRE(rig.offloader().plan_report());
  CHECK(rig.stats().offloaded.bytes - before < kLogits);
}

}  // namespace
}  // namespace ebb

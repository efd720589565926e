// Parameters whose bytes are on the device around their uses only, beside the same parameters that stay.

#include <algorithm>
#include <cstdint>
#include <functional>
#include <future>
#include <limits>
#include <memory>
#include <optional>
#include <sstream>
#include <thread>
#include <utility>
#include <vector>

#include <ATen/Context.h>
#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/CPUAllocator.h>
#include <catch2/catch.hpp>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/library.h>
#include <torch/serialize/archive.h>

#include "offload/base/managed_key.h"
#include "offload/guard.h"
#include "offload/managed/manage.h"
#include "offload/optimizer_step.h"
#include "offload/parameters.h"
#include "policy/policies.h"
#include "test/checked/fault_plan.h"
#include "test/offload/managed/managed_helpers.h"
#include "test/offload/rig.h"

namespace ebb {
namespace {

using test::check_equal;
using test::is_away;
using test::within;

constexpr std::int64_t kWidth = 32;
constexpr std::uint64_t kBytes = kWidth * kWidth * sizeof(float);

std::vector<at::Tensor> make_weights(std::size_t count) {
  at::manual_seed(1);
  std::vector<at::Tensor> weights;
  for (std::size_t i = 0; i < count; ++i) {
    weights.push_back((at::randn({kWidth, kWidth}) * 0.2).requires_grad_());
  }
  return weights;
}

// The first weight is used by the last layer, too.
at::Tensor loss_of(const std::vector<at::Tensor>& weights, const at::Tensor& input) {
  at::Tensor hidden = input;
  for (const at::Tensor& weight : weights) {
    hidden = at::silu(at::matmul(hidden, weight.t()));
  }
  return at::matmul(hidden, weights.front()).square().mean();
}

void update(const std::vector<at::Tensor>& weights) {
  const at::NoGradGuard no_grad;
  for (const at::Tensor& weight : weights) {
    weight.sub_(weight.grad() * 0.1);
    weight.mutable_grad().reset();
  }
}

// Losses of some steps, then the weights.
std::vector<at::Tensor> train(const std::vector<at::Tensor>& weights, Offloader* offloader) {
  std::vector<at::Tensor> seen;
  for (int step = 0; step < 4; ++step) {
    const at::Tensor input = at::arange(4 * kWidth, at::kFloat).view({4, kWidth}).sin() + step;
    at::Tensor loss;
    {
      const auto guard = offloader == nullptr ? nullptr : std::make_unique<OffloadGuard>(*offloader);
      loss = loss_of(weights, input);
    }
    torch::autograd::backward({loss});
    update(weights);
    seen.push_back(loss.detach());
  }
  for (const at::Tensor& weight : weights) {
    seen.push_back(weight.detach().clone());
  }
  return seen;
}

// What reads a tensor's memory without an operation.
std::vector<std::function<void(const at::Tensor&)>> raw_accesses() {
  return {
      [](const at::Tensor& tensor) { static_cast<void>(tensor.data_ptr<float>()); },
      [](const at::Tensor& tensor) { static_cast<void>(tensor.const_data_ptr()); },
      [](const at::Tensor& tensor) { static_cast<void>(tensor.mutable_data_ptr()); },
      [](const at::Tensor& tensor) { static_cast<void>(tensor.storage().data()); },
      [](const at::Tensor& tensor) { static_cast<void>(tensor.storage().data_ptr()); },
      [](const at::Tensor& tensor) { static_cast<void>(tensor.storage().mutable_data()); },
      [](const at::Tensor& tensor) {
        std::ostringstream out;
        torch::serialize::OutputArchive archive;
        archive.write("tensor", tensor);
        archive.save_to(out);
      },
  };
}

TEST_CASE("managed parameters train to the same bits, with few of them on the device", "[managed]") {
  const std::vector<at::Tensor> expected = train(make_weights(8), nullptr);
  const std::uint64_t bound = GENERATE(0U, 3 * kBytes, 100 * kBytes);
  for (const Setting& setting : some_settings()) {
    INFO(setting.name << ", bound " << bound);
    Rig rig(setting);
    std::vector<at::Tensor> weights = make_weights(8);
    rig.offloader().manage(weights, within(bound));
    check_equal(expected, train(weights, nullptr));
    rig.offloader().drain();
    rig.offloader().reset_stats();  // all weights were there in the beginning
    static_cast<void>(train(weights, nullptr));
    const std::uint64_t made_and_used = 2 * kBytes;  // a gradient where the bound is full, and an operation's weight
    CHECK(rig.stats().managed_on_device.peak_bytes <= bound + made_and_used);
    weights.clear();
  }
}

TEST_CASE("managed parameters train to the same bits beside saves that move", "[managed]") {
  const std::vector<at::Tensor> expected = train(make_weights(8), nullptr);
  for (const Setting& setting : some_settings()) {
    INFO(setting.name);
    Rig rig(setting);
    std::vector<at::Tensor> weights = make_weights(8);
    rig.offloader().manage(weights, within(2 * kBytes));
    check_equal(expected, train(weights, &rig.offloader()));
    CHECK(rig.stats().offloaded.tensors > 0);
    weights.clear();
  }
}

TEST_CASE("managed parameters are inputs of recipes", "[managed]") {
  const std::vector<at::Tensor> expected = train(make_weights(8), nullptr);
  Setting setting = late_without_stash();
  setting.options.policy = recompute();
  Rig rig(setting);
  std::vector<at::Tensor> weights = make_weights(8);
  rig.offloader().manage(weights, within(2 * kBytes));
  check_equal(expected, train(weights, &rig.offloader()));
  CHECK(rig.stats().recomputed.tensors > 0);
  weights.clear();
}

TEST_CASE("a managed parameter has no memory while its bytes are at home", "[managed]") {
  Rig rig(disk());
  {
    const std::vector<at::Tensor> weights = make_weights(2);
    const at::Tensor before = weights[0].detach().clone();
    const at::Tensor alias = weights[0].detach();
    rig.offloader().manage(weights, within(0));
    CHECK(is_managed(weights[0]));
    CHECK(is_managed(weights[0].t()));
    CHECK_FALSE(is_managed(before));
    CHECK(is_away(weights[0]));
    CHECK(weights[0].storage().nbytes() == kBytes);
    for (const auto& access : raw_accesses()) {
      CHECK_THROWS_WITH(access(weights[0]), Catch::Contains("comes and goes"));
    }
    CHECK_THROWS_WITH(alias.sum(), Catch::Contains("comes and goes"));
    CHECK(at::equal(weights[0], before));
    CHECK(at::equal(weights[0].select(0, 3), before.select(0, 3)));
    {
      const at::NoGradGuard no_grad;
      weights[0].select(0, 1).fill_(7);  // through a view
    }
    static_cast<void>(weights[1].sum());  // the first goes home meanwhile
    CHECK(is_away(weights[0]));
    CHECK(at::equal(weights[0].select(0, 1), at::full({kWidth}, 7)));
  }
}

TEST_CASE("while addresses may be read, they are null or the bytes' own, and nobody may write", "[managed]") {
  Rig rig(disk());
  {
    const std::vector<at::Tensor> weights = make_weights(2);
    rig.offloader().manage(weights, within(kBytes + kBytes / 2));
    const bool first_is_away = is_away(weights[0]);
    REQUIRE(first_is_away != is_away(weights[1]));
    let_addresses_be_read(true);
    for (const at::Tensor& each : weights) {
      CHECK((each.storage().data() == nullptr) == is_away(each));
      CHECK_THROWS_AS(each.mutable_data_ptr(), c10::Error);
    }
    static_cast<void>(weights[0].sum());
    CHECK(weights[0].storage().data() != nullptr);
    CHECK(weights[1].storage().data() == nullptr);
    CHECK_THROWS_AS(weights[0].mutable_data_ptr(), c10::Error);
    let_addresses_be_read(false);
    for (const at::Tensor& each : weights) {
      CHECK_THROWS_WITH(each.storage().data(), Catch::Contains("comes and goes"));
      CHECK_THROWS_WITH(each.mutable_data_ptr(), Catch::Contains("comes and goes"));
    }
  }
}

TEST_CASE("the bytes of a storage can be read, and written, without a tensor of the program's", "[managed]") {
  Rig rig(disk());
  {
    const std::vector<at::Tensor> weights = make_weights(2);
    const at::Tensor expected = weights[0].detach().clone();
    rig.offloader().manage(weights, within(0));
    const at::Tensor bytes = bytes_of(weights[0].storage());
    CHECK(bytes.numel() == static_cast<std::int64_t>(kBytes));
    CHECK(at::equal(bytes, bytes_of(expected.storage())));
    bytes.zero_();
    CHECK(at::equal(weights[0], at::zeros_like(expected)));
  }
}

TEST_CASE("tensors of one storage are managed together", "[managed]") {
  Rig rig(disk());
  {
    const at::Tensor base = at::arange(64, at::kFloat);
    const at::Tensor half = base.narrow(0, 32, 32);
    rig.offloader().manage(std::vector<at::Tensor>{base, half}, within(0));
    base.add_(1);
    half.mul_(2);
    CHECK(at::equal(base, at::cat({at::arange(1, 33, at::kFloat), at::arange(33, 65, at::kFloat) * 2})));
  }
}

TEST_CASE("a managed storage that is resized is the program's again", "[managed]") {
  Rig rig(disk());
  const at::Tensor tensor = at::ones({64});
  rig.offloader().manage(std::vector<at::Tensor>{tensor}, within(0));
  tensor.resize_({1024});
  CHECK(at::equal(tensor.narrow(0, 0, 64), at::ones({64})));
  tensor.fill_(2);
  CHECK(at::equal(tensor, at::full({1024}, 2.0)));
}

TEST_CASE("a managed storage that is resized or replaced without an operation is the program's again", "[managed]") {
  const bool is_away = GENERATE(true, false);
  Rig rig(disk());
  const at::Tensor tensor = at::ones({64});
  const at::Tensor other = at::ones({64});
  rig.offloader().manage(std::vector<at::Tensor>{tensor, other}, within(is_away ? 0 : 1024));
  static_cast<void>(other.sum());
  c10::StorageImpl* const storage = tensor.storage().unsafeGetStorageImpl();
  at::DataPtr memory = c10::GetCPUAllocator()->allocate(64 * sizeof(float));
  std::fill_n(static_cast<float*>(memory.get()), 64, 5.0F);
  storage->set_data_ptr_noswap(std::move(memory));
  CHECK(at::equal(tensor, at::full({64}, 5.0)));
  CHECK(tensor.data_ptr<float>()[0] == 5);
  for (int i = 0; i < 3; ++i) {  // and the other one still leaves
    static_cast<void>(other.sum());
    static_cast<void>(tensor.sum());
  }
  CHECK(at::equal(other, at::ones({64})));
}

TEST_CASE("running statistics that no schema says are written come home", "[managed]") {
  Rig rig(disk());
  const at::Tensor mean = at::zeros({4});
  const at::Tensor variance = at::ones({4});
  const at::Tensor plain_mean = mean.clone();
  const at::Tensor plain_variance = variance.clone();
  rig.offloader().manage(std::vector<at::Tensor>{mean, variance}, within(0));
  for (int i = 0; i < 3; ++i) {
    const at::Tensor input = at::arange(32, at::kFloat).view({8, 4}) * i;
    static_cast<void>(at::batch_norm(input, {}, {}, mean, variance, true, 0.1, 1e-5, false));
    static_cast<void>(at::batch_norm(input, {}, {}, plain_mean, plain_variance, true, 0.1, 1e-5, false));
  }
  CHECK(at::equal(mean, plain_mean));
  CHECK(at::equal(variance, plain_variance));
}

TEST_CASE("what cannot be managed is refused", "[managed]") {
  Rig rig(disk());
  Rig other(disk());
  const at::Tensor tensor = at::ones({64});
  CHECK_THROWS_WITH(rig.offloader().manage(std::vector<at::Tensor>{tensor.to_sparse()}, within(0)),
                    Catch::Contains("dense"));
  CHECK_THROWS_WITH(rig.offloader().manage(std::vector<at::Tensor>{tensor.to(at::kMeta)}, within(0)),
                    Catch::Contains("can be managed"));
  CHECK_THROWS_WITH(rig.offloader().manage(std::vector<at::Tensor>{tensor}, {}),
                    Catch::Contains("Parameters::device_bytes is not set"));
  std::vector<float> memory(64);
  CHECK_THROWS_WITH(rig.offloader().manage(std::vector<at::Tensor>{at::from_blob(memory.data(), {64})}, within(0)),
                    Catch::Contains("does not own"));
  rig.offloader().manage(std::vector<at::Tensor>{tensor}, within(0));
  CHECK_THROWS_WITH(other.offloader().manage(std::vector<at::Tensor>{tensor}, within(0)), Catch::Contains("another"));
  CHECK(at::equal(tensor, at::ones({64})));
}

TEST_CASE("two threads train models that one offloader manages, within one bound", "[managed]") {
  const std::vector<at::Tensor> expected = train(make_weights(6), nullptr);
  Options options;
  options.device = at::kCPU;
  Offloader offloader(options);
  std::vector<std::vector<at::Tensor>> weights;
  std::vector<std::vector<at::Tensor>> found(2);
  for (std::size_t i = 0; i < found.size(); ++i) {
    weights.push_back(make_weights(6));
    offloader.manage(weights.back(), within(2 * kBytes));
  }
  std::vector<std::thread> threads;
  for (std::size_t i = 0; i < found.size(); ++i) {
    threads.emplace_back([&, i] { found[i] = train(weights[i], nullptr); });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  for (const std::vector<at::Tensor>& each : found) {
    check_equal(expected, each);
  }
  weights.clear();
  CHECK(offloader.stats().managed.tensors == 0);
}

TEST_CASE("a managed storage whose copy home fails stays on the device, and nothing is lost", "[managed]") {
  const std::vector<at::Tensor> expected = train(make_weights(4), nullptr);
  Options options;
  options.device = at::kCPU;
  options.disk_io = GENERATE(DiskIo::kThreads, DiskIo::kUring);
  const auto extent = GENERATE(FaultPlan::Extent::kOnce, FaultPlan::Extent::kFromThenOn);
  const std::uint64_t nth = GENERATE(1U, 3U, 9U);
  Offloader offloader(options);
  const std::vector<at::Tensor> weights = make_weights(4);
  const PlannedFault fault(FaultPoint::kPwrite, nth, extent);
  offloader.manage(weights, within(GENERATE(0U, 2 * kBytes)));
  check_equal(expected, train(weights, nullptr));
  CHECK(FaultPlan::failures(FaultPoint::kPwrite) > 0);
  offloader.drain();
  CHECK(offloader.stats().managed_on_device.now_bytes >= kBytes);
}

TEST_CASE("a new offloader ends what one that has ended has left of tensors that have ended since", "[managed]") {
  std::weak_ptr<SimulatedTier> old;
  at::Tensor tensor = at::ones({64});
  {
    const std::shared_ptr<SimulatedTier> tier = make_tier(late());
    old = tier;
    const std::unique_ptr<Offloader> offloader = make_offloader(late(), tier);
    offloader->manage(std::vector<at::Tensor>{tensor}, within(0));
  }
  CHECK(at::equal(tensor, at::ones({64})));
  const std::unique_ptr<Offloader> beside = make_offloader(late(), make_tier(late()));
  CHECK_FALSE(old.expired());
  CHECK_THROWS_WITH(beside->manage(std::vector<at::Tensor>{tensor}, within(0)),
                    Catch::Contains("managed first") && Catch::Contains("clone()"));
  tensor.set_data(tensor.detach().clone());
  CHECK_NOTHROW(beside->manage(std::vector<at::Tensor>{tensor}, within(0)));
  CHECK(at::equal(tensor, at::ones({64})));
  const std::unique_ptr<Offloader> next = make_offloader(late(), make_tier(late()));
  CHECK(old.expired());
}

// Writes the number at last, to the memory that it has been given at first.
struct LateWrite {
  std::promise<void> has_begun;
  std::promise<void> may_end;
};
LateWrite* late_write = nullptr;

void write_late(const at::Tensor& tensor, double number) {
  float* const begin = tensor.mutable_data_ptr<float>();
  late_write->has_begun.set_value();
  late_write->may_end.get_future().wait();
  std::fill_n(begin, tensor.numel(), static_cast<float>(number));
}

// As a program does, before manage().
void call_after_gradient(const at::Tensor& leaf, std::function<void(const at::Tensor&)> call) {
  struct Hook final : torch::autograd::PostAccumulateGradHook {
    explicit Hook(std::function<void(const at::Tensor&)> calls) : call(std::move(calls)) {}
    void operator()(const at::Tensor& given) override { call(given); }
    std::function<void(const at::Tensor&)> call;
  };
  torch::autograd::impl::set_post_acc_grad_hooks(leaf, std::make_unique<Hook>(std::move(call)));
}

TEST_CASE("a gradient that another thread is writing does not leave", "[managed]") {
  static const torch::Library library = [] {
    torch::Library made(torch::Library::DEF, "ebb_managed_test", std::nullopt, __FILE__, __LINE__);
    made.def("write_late(Tensor(a!) tensor, float number) -> ()", &write_late);
    return made;
  }();
  const auto operation = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("ebb_managed_test::write_late", "")
                             .typed<void(const at::Tensor&, double)>();
  LateWrite write;
  late_write = &write;
  const std::unique_ptr<Offloader> offloader = make_offloader(late(), make_tier(late()));
  const std::vector<at::Tensor> weights = make_weights(4);
  std::thread other;
  call_after_gradient(weights[3], [&](const at::Tensor& leaf) {
    other = std::thread([&] { operation.call(leaf.grad(), 5.0); });
    write.has_begun.get_future().wait();
  });
  offloader->manage(weights, within(0));
  torch::autograd::backward({loss_of(weights, at::ones({4, kWidth}))});
  write.may_end.set_value();
  other.join();
  CHECK(weights[3].grad().eq(5).all().item<bool>());
  CHECK_FALSE(has_home(weights[3].grad()));
  CHECK(is_away(weights[2].grad()));
}

TEST_CASE("a gradient that the program's hook sees is observed there, and has its memory", "[managed]") {
  const std::unique_ptr<Offloader> offloader = make_offloader(late(), make_tier(late()));
  const std::vector<at::Tensor> weights = make_weights(2);
  std::vector<float> seen;
  for (const at::Tensor& weight : weights) {
    call_after_gradient(weight, [&](const at::Tensor& leaf) {
      CHECK(is_managed(leaf.grad()));
      seen.push_back(*leaf.grad().data_ptr<float>());
    });
  }
  offloader->manage(weights, within(0));
  torch::autograd::backward({loss_of(weights, at::ones({4, kWidth}))});
  CHECK(seen.size() == 2);
  CHECK(is_away(weights[0].grad()));
  CHECK(is_away(weights[1].grad()));
}

TEST_CASE("weights that are frozen when they are given to manage() have their gradients managed later", "[managed]") {
  const std::unique_ptr<Offloader> offloader = make_offloader(late(), make_tier(late()));
  const std::vector<at::Tensor> weights = make_weights(3);
  weights[1].requires_grad_(false);
  offloader->manage(weights, within(0));
  weights[1].requires_grad_();
  torch::autograd::backward({loss_of(weights, at::ones({4, kWidth}))});
  for (const at::Tensor& weight : weights) {
    CHECK(has_home(weight.grad()));
  }
}

TEST_CASE("gradients are managed while another thread goes backward", "[managed]") {
  const std::unique_ptr<Offloader> offloader = make_offloader(late(), make_tier(late()));
  const std::vector<at::Tensor> weights = make_weights(3);
  offloader->manage(weights, within(0));
  const at::Tensor others = at::ones({1}).requires_grad_();
  std::promise<void> has_begun;
  std::promise<void> may_end;
  others.register_hook([&](const at::Tensor& /*gradient*/) {
    has_begun.set_value();
    may_end.get_future().wait();
  });
  std::thread other([&] { torch::autograd::backward({others * 2}); });
  has_begun.get_future().wait();
  torch::autograd::backward({loss_of(weights, at::ones({4, kWidth}))});
  for (const at::Tensor& weight : weights) {
    CHECK(has_home(weight.grad()));
  }
  may_end.set_value();
  other.join();
}

TEST_CASE("lists of different lengths are LibTorch's error, and nothing is changed", "[managed]") {
  const std::unique_ptr<Offloader> offloader = make_offloader(late(), make_tier(late()));
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> tensors;
  for (int i = 0; i < 4; ++i) {
    tensors.push_back(at::ones({8}));
  }
  const std::vector<at::Tensor> plain = {at::ones({8}), at::ones({8})};
  offloader->manage(tensors, within(0));
  const std::vector<at::Tensor> one = {at::ones({8})};
  const std::vector<at::Scalar> number = {2.0};
  CHECK_THROWS_WITH(at::_foreach_add_(tensors, one), Catch::Contains("got 4 and 1"));
  CHECK_THROWS_AS(at::_foreach_mul_(tensors, number), c10::Error);
  CHECK_THROWS_AS(at::_foreach_copy_(tensors, one), c10::Error);
  CHECK_THROWS_AS(at::_foreach_addcmul_(tensors, tensors, one), c10::Error);
  CHECK_THROWS_AS(at::_foreach_add_(tensors, std::vector<at::Tensor>{}), c10::Error);
  for (const at::Tensor& each : tensors) {
    CHECK(at::equal(each, at::ones({8})));
  }
}

TEST_CASE("gradients are unscaled a few at a time", "[managed]") {
  const std::unique_ptr<Offloader> offloader = make_offloader(late(), make_tier(late()));
  std::vector<at::Tensor> tensors;
  for (int i = 0; i < 8; ++i) {
    tensors.push_back(at::full({kWidth, kWidth}, 2.0 * i));
  }
  tensors[5][0][0] = std::numeric_limits<float>::infinity();
  offloader->manage(tensors, within(2 * kBytes));
  offloader->drain();
  offloader->reset_stats();
  at::Tensor found_inf = at::zeros({1});
  at::_amp_foreach_non_finite_check_and_unscale_(tensors, found_inf, at::full({1}, 0.5));
  CHECK(offloader->stats().managed_on_device.peak_bytes <= 2 * kBytes);
  CHECK(found_inf.item<float>() == 1);
  CHECK(tensors[7].eq(7).all().item<bool>());
}

TEST_CASE("what managed tensors took is known after their end, until it is reset", "[managed]") {
  const std::unique_ptr<Offloader> offloader = make_offloader(late(), make_tier(late()));
  {
    const std::vector<at::Tensor> weights = make_weights(3);
    offloader->manage(weights, within(kBytes));
    for (const at::Tensor& weight : weights) {
      static_cast<void>(weight.detach().add(1));
    }
  }
  for (int i = 0; i < 2; ++i) {  // the first call may be what lets go of the last of them
    const Stats stats = offloader->stats();
    CHECK(stats.managed_on_device.peak_bytes >= kBytes);
    CHECK(stats.managed_fetched_late.tensors >= 2);
    forget_ended_storages();
  }
  offloader->reset_stats();
  CHECK(offloader->stats().managed_on_device.peak_bytes == 0);
  CHECK(offloader->stats().managed_fetched_late.tensors == 0);
}

TEST_CASE("what is released is the program's again, with its gradient and its states", "[managed]") {
  const std::unique_ptr<Offloader> offloader = make_offloader(late(), make_tier(late()));
  const std::vector<at::Tensor> weights = make_weights(3);
  const std::vector<at::Tensor> expected = train(make_weights(3), nullptr);
  offloader->manage(weights, within(GENERATE(0U, 2 * kBytes)));
  const at::Tensor state = [&] {
    const at::NoGradGuard no_grad;
    const OptimizerStep step(weights);
    return at::zeros_like(weights[0]);
  }();
  torch::autograd::backward({loss_of(weights, at::ones({4, kWidth}))});
  CHECK(has_home(state));
  const at::Tensor gradient = weights[0].grad();
  offloader->release(std::vector<at::Tensor>{weights[0], weights[1]});
  for (const at::Tensor& each : {weights[0], weights[1], gradient, state}) {
    CHECK_FALSE(has_home(each));
    CHECK_NOTHROW(each.data_ptr<float>());
  }
  CHECK(offloader->stats().managed.tensors == 2);  // a weight and its gradient
  for (const at::Tensor& weight : weights) {
    weight.mutable_grad().reset();
  }
  check_equal(expected, train(weights, nullptr));
  CHECK_NOTHROW(offloader->manage(weights, within(0)));
  CHECK(has_home(weights[0]));
}

TEST_CASE("the bound holds where the history jumps twice in a row", "[managed]") {
  constexpr std::int64_t kElements = 1024;
  constexpr std::uint64_t kBytes = kElements * sizeof(float);
  constexpr std::uint64_t kHere = 8;
  Rig rig(late_without_stash());
  std::vector<at::Tensor> tensors;
  for (std::uint64_t i = 0; i < kHere + 2; ++i) {
    tensors.push_back(at::ones({kElements}).requires_grad_());
  }
  rig.offloader().manage(tensors, within(kHere * kBytes));
  const auto use = [&](std::size_t i) { static_cast<void>(tensors[i].detach().add(1)); };
  for (int period = 0; period < 3; ++period) {
    for (std::uint64_t i = 0; i < kHere; ++i) {
      use(i);
    }
  }
  rig.offloader().reset_stats();
  use(5);  // as never before
  use(kHere);
  use(kHere + 1);
  CHECK(rig.stats().managed_on_device.peak_bytes <= kHere * kBytes);
}

TEST_CASE("copies start ahead again soon after the history has jumped back", "[managed]") {
  constexpr std::size_t kCount = 64;
  constexpr std::int64_t kElements = 1024;
  constexpr std::uint64_t kBytes = kElements * sizeof(float);
  Rig rig(late_without_stash());
  std::vector<at::Tensor> tensors;
  for (std::size_t i = 0; i < kCount; ++i) {
    tensors.push_back(at::ones({kElements}).requires_grad_());
  }
  Parameters how = within(kCount / 4 * kBytes);
  how.prefetch_bytes = 4 * kBytes;
  rig.offloader().manage(tensors, how);
  const auto use = [&](std::size_t i) { static_cast<void>(tensors[i].detach().add(1)); };
  const auto forward = [&] {
    for (std::size_t i = 0; i < kCount; ++i) {
      use(i);
    }
  };
  const auto backward = [&] {
    for (std::size_t i = kCount; i-- > 0;) {
      use(i);
    }
  };
  const auto train = [&] {
    forward();
    backward();
    forward();  // an optimizer's step
  };
  for (int step = 0; step < 4; ++step) {
    train();
  }
  forward();  // two evaluations
  forward();
  forward();
  rig.offloader().reset_stats();
  backward();
  CHECK(rig.stats().managed_fetched_late.tensors < kCount / 2);
}

}  // namespace
}  // namespace ebb

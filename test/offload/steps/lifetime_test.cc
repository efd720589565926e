#include <memory>

#include <ATen/Functions.h>
#include <torch/csrc/autograd/autograd.h>

#include <catch2/catch.hpp>

#include "offload/saving/runtime.h"
#include "policy/policies.h"
#include "test/offload/cache/ordering_world.h"
#include "test/offload/parity.h"

namespace ebb {
namespace {

constexpr std::size_t kBytes = test::OrderingWorld::kBytes;

Options everything() {
  Options options;
  options.policy = offload_everything();
  options.stash_bytes = std::uint64_t{1} << 30;
  return options;
}

}  // namespace

TEST_CASE_METHOD(NoLeak, "nothing of an offloader outlives its graphs, also after a double backward") {
  const auto tier = make_tier(late());
  {
    Offloader offloader(everything(), tier);
    Inputs in;
    const OffloadGuard guard(offloader);
    const at::Tensor x = in.activation({64});
    const at::Tensor first = torch::autograd::grad({x.pow(3).sum()}, {x}, {}, true, /*create_graph=*/true)[0];
    static_cast<void>(torch::autograd::grad({first.pow(2).sum()}, {x}));
  }
  CHECK(tier.use_count() == 1);
}

TEST_CASE_METHOD(NoLeak, "a dropped graph gives the stash's memory back as soon as the copies are done") {
  const auto tier = make_tier(late());
  Offloader offloader(everything(), tier);
  {
    Inputs in;
    const OffloadGuard guard(offloader);
    static_cast<void>(in.activation({64}).pow(2).sum());
  }
  CHECK(offloader.stats().stash.now_bytes > 0);
  tier->run_all();
  CHECK(offloader.stats().stash.now_bytes == 0);
  CHECK(offloader.stats().saved_on_device.now_bytes == 0);
}

TEST_CASE_METHOD(NoLeak, "steps are counted in one guard around a loop, also where everything is kept") {
  Options options = everything();
  options.policy = except_operations({}, minimum_size(std::uint64_t{1} << 30));
  Offloader offloader(options, make_tier(late()));
  const OffloadGuard guard(offloader);
  for (int step = 0; step < 3; ++step) {
    Inputs in;
    in.activation({64}).pow(2).sum().backward();
  }
  CHECK(offloader.stats().steps == 3);
}

TEST_CASE_METHOD(NoLeak, "a tensor of zeros without memory passes through") {
  Offloader offloader(everything(), make_tier(late()));
  Inputs in;
  const OffloadGuard guard(offloader);
  const at::Tensor x = in.leaf({4, 4});
  const at::Tensor loss = at::mul(x, at::_efficientzerotensor({4, 4}, at::kFloat)).sum();
  CHECK(offloader.stats().kept_for(KeptReason::kUnmovable).tensors == 1);
  CHECK(at::equal(torch::autograd::grad({loss}, {x})[0], at::zeros({4, 4})));
}

TEST_CASE("after a copy in that failed, any of the storage's saves may ask again") {
  const auto failing = make_tier(late());
  const auto runtime = [&] {
    Options options = everything();
    options.device = failing->device();
    options.stash_bytes = 1;
    return std::make_shared<Runtime>(options, failing);
  }();
  c10::Storage storage(c10::Storage::use_byte_size_t(), kBytes, failing->allocate(kBytes));
  at::Tensor saved = at::empty({0}).set_(storage, 0, {static_cast<std::int64_t>(kBytes / sizeof(float))}, {1});
  saved.fill_(7);
  storage = {};
  SavedStorage::Use one(runtime->save(saved, runtime->steps().of_this_thread()));
  SavedStorage::Use other(runtime->save(saved, runtime->steps().of_this_thread()));
  saved.reset();
  failing->fail_copy(1);
  CHECK_THROWS_WITH(one.get(), Catch::Contains("simulated copy failure"));
  CHECK(*static_cast<const float*>(one.get().data()) == 7);
  CHECK(*static_cast<const float*>(other.get().data()) == 7);
}

TEST_CASE("a source that is found again is counted, whether asked for or prefetched") {
  test::OrderingWorld world(Schedule::kLate, 0, {});
  const at::Tensor first = world.make(1);
  const at::Tensor last = world.make(2);
  const auto use_first = world.save(first);
  const auto use_last = world.save(last);
  static_cast<void>(use_last->get());
  static_cast<void>(use_first->get());
  CHECK(world.runtime->residency().stats().reused.tensors == 2);
  CHECK(world.runtime->residency().stats().fetched.tensors == 0);
}

TEST_CASE("an offloader over no tier is an error") {
  CHECK_THROWS_WITH(Offloader(Options{}, std::shared_ptr<Tier>()), Catch::Contains("null"));
}

}  // namespace ebb

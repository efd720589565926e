// What ordering_test.cc asks of a simulated device, asked of a real one: each case holds up streams, lanes and copy
// engines so that without one wait of docs/design.md the wrong bytes are moved, or read, every time. Only bytes are
// checked.

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <optional>
#include <random>
#include <vector>

#include <ATen/ATen.h>
#include <c10/cuda/CUDAGuard.h>
#include <catch2/catch.hpp>
#include <torch/csrc/autograd/autograd.h>

#include "offload/cache/stash.h"
#include "offload/guard.h"
#include "offload/offloader.h"
#include "policy/policies.h"
#include "test/gpu/delays.h"
#include "test/offload/cache/gpu_ordering_world.h"

namespace ebb {
namespace {

using c10::cuda::CUDAStreamGuard;
using test::GpuOrderingWorld;
using test::other_stream;
using test::spin;

// Two sizes, others for each value of the environment variable EBB_SEED.
std::int64_t any_size() {
  static const char* const set = std::getenv("EBB_SEED");
  static const std::uint64_t first = set == nullptr ? 0 : 2 * std::strtoull(set, nullptr, 10);
  std::mt19937_64 random(first + static_cast<std::uint64_t>(GENERATE(range(0, 2))));
  return std::uniform_int_distribution(GpuOrderingWorld::kLeastInts, GpuOrderingWorld::kMostInts)(random);
}

}  // namespace

TEST_CASE("on a GPU a copy out reads what a busy stream has yet to compute", "[gpu][gpu_ordering]") {
  GpuOrderingWorld world(any_size(), {});
  spin();
  const auto use = world.save(world.make(7));
  world.read(use->get());
  CHECK(world.seen() == std::vector<int>{7});
}

TEST_CASE("on a GPU a source is not freed before its copy out, however late that runs", "[gpu][gpu_ordering]") {
  const std::uint64_t stash_storages = GENERATE(0, 1, 100);
  GpuOrderingWorld world(any_size(), {.stash_storages = stash_storages});
  world.lanes.hold_out();
  std::vector<std::unique_ptr<SavedStorage::Use>> uses;
  for (const int value : {1, 2, 3, 4}) {
    uses.push_back(world.save(world.make(value)));  // in the memory of the last, if that was let go too early
  }
  world.runtime->residency().stash().drain();
  GpuOrderingWorld::finish();
  for (auto use = uses.rbegin(); use != uses.rend(); ++use) {
    world.read((*use)->get());
  }
  CHECK(world.seen() == std::vector<int>{4, 3, 2, 1});
}

TEST_CASE("on a GPU a stash that ends with copies under way frees no memory that they read", "[gpu][gpu_ordering]") {
  GpuOrderingWorld world(any_size(), {});
  Tier& tier = world.runtime->tier();
  const std::optional<Block> block = tier.try_acquire(world.bytes);
  REQUIRE(block);
  world.lanes.hold_out();
  {
    Stash stash(tier);
    const at::Tensor source = world.make(7);
    const c10::Stream stream = tier.current_stream();
    const Ticket left = tier.copy_out(*block, source.const_data_ptr(), {WaitPoint::kCaller, tier.record(stream)});
    stash.hold(Stash::prepare(stream), {nullptr, source.storage(), left, stream}, world.bytes);
  }
  static_cast<void>(world.make_everywhere(9));
  GpuOrderingWorld::finish();
  const auto* const copied = static_cast<const int*>(block->data());
  CHECK(std::all_of(copied, copied + world.ints, [](int value) { return value == 7; }));
}

TEST_CASE("on a GPU a copy in waits for the copy out of the same bytes, held up on another stream",
          "[gpu][gpu_ordering]") {
  GpuOrderingWorld world(any_size(), {});
  spin();
  const auto use = world.save(world.make(7));
  const CUDAStreamGuard other(other_stream());
  world.read(use->get());
  CHECK(world.seen() == std::vector<int>{7});
}

TEST_CASE("on a GPU a kernel waits for the copy in of what it reads", "[gpu][gpu_ordering]") {
  GpuOrderingWorld world(any_size(), {});
  const auto use = world.save(world.make(7));
  static_cast<void>(world.make_everywhere(GpuOrderingWorld::kStale));  // or the old bytes would do
  GpuOrderingWorld::finish();
  world.lanes.hold_in();
  world.read(use->get());
  CHECK(world.seen() == std::vector<int>{7});
}

TEST_CASE("on a GPU a copy in leaves memory alone that a late kernel still reads", "[gpu][gpu_ordering]") {
  GpuOrderingWorld world(any_size(), {});
  const auto use = world.save(world.make(7));
  GpuOrderingWorld::finish();
  std::vector<int> expected;
  {
    const std::vector<at::Tensor> earlier = world.make_everywhere(3);
    spin();
    for (const at::Tensor& tensor : earlier) {
      world.read(tensor.storage());
      expected.push_back(3);
    }
  }  // freed by the host; the copy in gets the memory of one of them
  world.read(use->get());
  expected.push_back(7);
  CHECK(world.seen() == expected);
}

TEST_CASE("on a GPU a block is not written while an earlier owner's late copy in has yet to read it",
          "[gpu][gpu_ordering]") {
  GpuOrderingWorld world(any_size(), {.one_block = true});
  auto first = world.save(world.make(7));
  GpuOrderingWorld::finish();
  spin();
  world.read(first->get());  // copied in when the stream is no longer busy
  first.reset();
  const CUDAStreamGuard other(other_stream());
  const auto second = world.save(world.make(8));
  REQUIRE(world.runtime->residency().stats().offloaded.tensors == 2);  // into the one block that there is
  world.read(second->get());
  CHECK(world.seen() == std::vector<int>{7, 8});
}

// On a lane of their own, copies out follow one another anyway.
TEST_CASE("on a GPU copies out into one block come in the order of its owners, whatever streams they run on",
          "[gpu][gpu_ordering]") {
  GpuOrderingWorld world(any_size(), {.one_block = true, .overlapped = false});
  spin();
  auto first = world.save(world.make(7));
  first.reset();
  const CUDAStreamGuard other(other_stream());
  const auto second = world.save(world.make(8));
  REQUIRE(world.runtime->residency().stats().offloaded.tensors == 2);
  GpuOrderingWorld::finish();
  world.read(second->get());
  CHECK(world.seen() == std::vector<int>{8});
}

TEST_CASE("on a GPU memory that was prefetched and never used is not reused before its copy in is done",
          "[gpu][gpu_ordering]") {
  GpuOrderingWorld world(any_size(), {});
  auto unused = world.save(world.make(7));
  const at::Tensor alive = world.make(8);  // its use copies nothing, so that the stream waits for nothing
  const auto last = world.save(alive);
  GpuOrderingWorld::finish();
  world.lanes.hold_in();
  world.read(last->get());  // fetches the other ahead
  REQUIRE(world.runtime->residency().window().now_bytes() == world.bytes);
  unused.reset();
  const std::vector<at::Tensor> next = world.make_everywhere(9);  // one of them in the memory that the copy in writes
  GpuOrderingWorld::finish();
  std::vector<int> expected{8};
  for (const at::Tensor& tensor : next) {
    world.read(tensor.storage());
    expected.push_back(9);
  }
  CHECK(world.seen() == expected);
}

TEST_CASE("on a GPU a stream does not get the copy that another stream has prefetched and has to wait for",
          "[gpu][gpu_ordering]") {
  GpuOrderingWorld world(any_size(), {});
  const auto saved = world.save(world.make(7));
  const at::Tensor alive = world.make(8);
  const auto last = world.save(alive);
  static_cast<void>(world.make_everywhere(GpuOrderingWorld::kStale));
  GpuOrderingWorld::finish();
  world.lanes.hold_in();
  world.read(last->get());  // fetches 7 ahead, on the default stream
  {
    const CUDAStreamGuard other(other_stream());
    world.read(saved->get());
  }
  CHECK(world.seen() == std::vector<int>{8, 7});
}

TEST_CASE("gradients on a GPU are exact though its streams, lanes and copy engines are held up",
          "[gpu][gpu_ordering]") {
  const std::optional<std::uint64_t> stash_bytes = GENERATE(std::optional<std::uint64_t>(1), std::nullopt);
  const std::int64_t size = any_size();
  test::start_afresh();
  const at::Tensor x = at::linspace(-1, 1, size, at::TensorOptions().device(c10::kCUDA, 0)).requires_grad_();
  const auto forward = [&x] {
    at::Tensor y = x * 1.5;
    for (int i = 0; i < 4; ++i) {
      y = y.sin() * y.sigmoid() + y;
    }
    return y.square().mean();
  };
  const at::Tensor expected = torch::autograd::grad({forward()}, {x})[0];
  const auto tier = std::make_shared<PinnedTier>(PinnedTier::Config{});
  Options options;
  options.policy = offload_everything();
  options.stash_bytes = stash_bytes;
  Offloader offloader(options, tier);
  test::LaneHold lanes(*tier);
  for (int step = 0; step < 2; ++step) {  // the first also pins host memory, for which CUDA may wait for the device
    at::Tensor loss;
    {
      const OffloadGuard guard(offloader);
      lanes.hold_out();
      spin();
      loss = forward();
    }
    lanes.hold_in();
    spin();
    CHECK(torch::autograd::grad({loss}, {x})[0].equal(expected));
  }
  CHECK(offloader.stats().fetched.tensors > 0);
}

}  // namespace ebb

#include <cstring>

#include <catch2/catch.hpp>

#include "offload/cache/fetched.h"
#include "offload/cache/stash.h"
#include "test/offload/cache/ordering_world.h"

// Each case removes the reason for one wait or hold of docs/design.md: without it, some schedule below moves the bytes
// at the wrong time, and a kernel reads something else than was saved.

namespace ebb {
namespace {

using test::any_order;
using test::OrderingWorld;

constexpr std::size_t kBytes = OrderingWorld::kBytes;

}  // namespace

TEST_CASE("a copy out reads what the compute stream has yet to compute", "[ordering]") {
  const auto [schedule, seed] = any_order();
  OrderingWorld world(schedule, seed, {});
  const auto use = world.save(world.make(7));
  world.read(use->get());
  world.run();
  CHECK(world.seen() == std::vector<float>{7});
}

TEST_CASE("a source is not freed before its copy out, however late that runs", "[ordering]") {
  const auto [schedule, seed] = any_order();
  const std::uint64_t stash_bytes = GENERATE(std::uint64_t{1}, kBytes, 100 * kBytes);
  OrderingWorld world(schedule, seed, {.stash_bytes = stash_bytes});
  std::vector<std::unique_ptr<SavedStorage::Use>> uses;
  for (float value = 0; value < 8; ++value) {
    uses.push_back(world.save(world.make(value)));  // memory that was let go too early is overwritten by the next make
  }
  world.runtime->residency().stash().drain();
  for (auto use = uses.rbegin(); use != uses.rend(); ++use) {
    world.read((*use)->get());
  }
  world.run();
  CHECK(world.seen() == std::vector<float>{7, 6, 5, 4, 3, 2, 1, 0});
}

TEST_CASE("the stash holds a source only until its copy is done", "[ordering]") {
  OrderingWorld world(Schedule::kLate, 0, {.stash_bytes = 100 * kBytes});
  const auto use = world.save(world.make(7));
  world.runtime->residency().stash().sweep();
  CHECK(world.runtime->residency().stash().gauge().now_bytes() == kBytes);
  world.run();
  world.runtime->residency().stash().sweep();
  CHECK(world.runtime->residency().stash().gauge().now_bytes() == 0);
}

TEST_CASE("a save that ends takes finished sources out of the stash", "[ordering]") {
  OrderingWorld world(Schedule::kLate, 0, {.stash_bytes = 100 * kBytes});
  auto use = world.save(world.make(7));
  world.run();
  use.reset();
  CHECK(world.runtime->residency().stash().gauge().now_bytes() == 0);
}

TEST_CASE("the stash never holds more than its bound", "[ordering]") {
  OrderingWorld world(Schedule::kLate, 0, {.stash_bytes = 3 * kBytes});
  std::vector<std::unique_ptr<SavedStorage::Use>> uses;
  for (float value = 0; value < 8; ++value) {
    uses.push_back(world.save(world.make(value)));
    CHECK(world.runtime->residency().stash().gauge().now_bytes() <= 3 * kBytes);
  }
  CHECK(world.runtime->residency().stash().gauge().now_bytes() == 3 * kBytes);
}

TEST_CASE("a copy in waits for the copy out of the same bytes", "[ordering]") {
  const auto [schedule, seed] = any_order();
  OrderingWorld world(schedule, seed, {});
  const auto use = world.save(world.make(7));
  const SimulatedStreamGuard other(1);  // which has no other reason to wait for stream 0
  world.read(use->get());
  world.run();
  CHECK(world.seen() == std::vector<float>{7});
}

TEST_CASE("a kernel waits for the copy in of what it reads", "[ordering]") {
  const auto [schedule, seed] = any_order();
  OrderingWorld world(schedule, seed, {});
  const auto use = world.save(world.make(7));
  world.run();
  world.read(use->get());
  world.run();
  CHECK(world.seen() == std::vector<float>{7});
}

TEST_CASE("a copy in leaves memory alone that an earlier kernel still reads", "[ordering]") {
  const auto [schedule, seed] = any_order();
  OrderingWorld world(schedule, seed, {});
  const auto use = world.save(world.make(7));
  world.run();
  {
    at::Tensor earlier = world.make(3);
    world.read(earlier.storage());
  }  // freed by the host; the copy in will get its memory while the kernel above may not have run
  world.read(use->get());
  world.run();
  CHECK(world.seen() == std::vector<float>{3, 7});
}

TEST_CASE("a block is not written while an earlier owner's copy in still reads it", "[ordering]") {
  const auto [schedule, seed] = any_order();
  OrderingWorld world(schedule, seed, {.capacity_bytes = kBytes});
  auto first = world.save(world.make(7));
  world.run();
  // The copy in on stream 0 has to wait for a kernel; stream 1 has nothing to wait for.
  const at::Tensor earlier = world.make(3);
  world.read(first->get());
  first.reset();
  const SimulatedStreamGuard other(1);
  const auto second = world.save(world.make(8));
  REQUIRE(world.runtime->residency().stats().offloaded.tensors == 2);  // into the one block that there is
  world.read(second->get());
  world.run();
  CHECK(world.seen() == std::vector<float>{7, 8});
}

TEST_CASE("a block that is dropped during its copy out is leased again only behind that copy", "[ordering]") {
  OrderingWorld world(Schedule::kLate, 0, {.capacity_bytes = kBytes, .stash_bytes = 100 * kBytes});
  auto use = world.save(world.make(7));
  use.reset();
  const std::optional<Block> block = world.tier->try_acquire(kBytes);
  REQUIRE(block);
  REQUIRE(block->gates().size() == 1);
  CHECK_FALSE(is_done(block->gates().front()));
  world.run();
  CHECK(is_done(block->gates().front()));
}

TEST_CASE("memory that was prefetched and never used is not reused before its copy in is done", "[ordering]") {
  const auto [schedule, seed] = any_order();
  OrderingWorld world(schedule, seed, {});
  auto unused = world.save(world.make(7));
  const auto last = world.save(world.make(8));
  world.run();
  world.read(last->get());  // fetches the other ahead
  REQUIRE(world.runtime->residency().window().now_bytes() == kBytes);
  unused.reset();
  CHECK(world.runtime->residency().window().now_bytes() == 0);
  const at::Tensor next = world.make(9);  // in the memory that the copy in writes
  world.read(next.storage());
  world.run();
  CHECK(world.seen() == std::vector<float>{8, 9});
}

TEST_CASE("a fetched copy is not handed to another stream than the one whose memory it is", "[ordering]") {
  const auto [schedule, seed] = any_order();
  OrderingWorld world(schedule, seed, {});
  auto saved = world.save(world.make(7));
  const auto last = world.save(world.make(8));
  world.run();
  world.read(last->get());  // fetches 7 ahead, on stream 0
  {
    const SimulatedStreamGuard other(1);
    world.read(saved->get());
  }
  saved.reset();
  const at::Tensor next = world.make(9);  // on stream 0, which knows nothing of the kernel on stream 1
  world.read(next.storage());
  world.run();
  CHECK(world.seen() == std::vector<float>{8, 7, 9});
}

TEST_CASE("a copy that two saves share stays on the device until both have used it", "[ordering]") {
  const auto [schedule, seed] = any_order();
  OrderingWorld world(schedule, seed, {});
  at::Tensor tensor = world.make(7);
  const auto first = world.save(tensor);
  const auto second = world.save(tensor.view({2, -1}));
  tensor.reset();
  world.run();
  world.read(first->get());
  world.read(second->get());
  CHECK(world.runtime->residency().stats().fetched.tensors == 1);
  world.run();
  CHECK(world.seen() == std::vector<float>{7, 7});
}

TEST_CASE("a second pass over a retained graph fetches again, and the device copy is gone in between", "[ordering]") {
  const auto [schedule, seed] = any_order();
  OrderingWorld world(schedule, seed, {});
  const auto use = world.save(world.make(7));
  world.run();
  world.read(use->get());
  CHECK(world.runtime->residency().ledger().on_device().now_bytes() == 0);
  world.read(use->get());
  CHECK(world.runtime->residency().stats().fetched.tensors == 2);
  world.run();
  CHECK(world.seen() == std::vector<float>{7, 7});
}

TEST_CASE("a source that is still on the device is used and nothing is copied", "[ordering]") {
  OrderingWorld world(Schedule::kLate, 0, {});
  const at::Tensor tensor = world.make(7);
  const auto use = world.save(tensor);
  CHECK(use->get().unsafeGetStorageImpl() == tensor.storage().unsafeGetStorageImpl());
  CHECK(world.runtime->residency().stats().fetched.tensors == 0);
  CHECK(world.runtime->residency().stats().reused.tensors == 1);
}

TEST_CASE("a source whose memory was swapped is read in its new memory, as plain autograd reads it", "[ordering]") {
  OrderingWorld world(Schedule::kLate, 0, {});
  const at::Tensor tensor = world.make(7);
  const auto use = world.save(tensor);
  const at::Tensor other = world.make(5);
  const c10::DataPtr saved = tensor.storage().set_data_ptr(other.storage().set_data_ptr(c10::DataPtr()));
  world.read(use->get());
  world.run();
  CHECK(world.seen() == std::vector<float>{5});
}

TEST_CASE("an offloader destroyed with copies under way frees no memory that they use", "[ordering]") {
  const auto [schedule, seed] = any_order();
  const auto tier = std::make_shared<SimulatedTier>(schedule, seed, std::nullopt, /*deferred_compute=*/true);
  const std::optional<Block> block = tier->try_acquire(kBytes);
  c10::Storage source(c10::Storage::use_byte_size_t(), kBytes, tier->allocate(kBytes));
  auto* const data = static_cast<std::byte*>(source.mutable_data());
  const c10::Stream stream = tier->current_stream();
  tier->compute(stream, [data] { std::fill_n(data, kBytes, std::byte{7}); });
  {
    Stash stash(*tier);
    const std::vector<Ticket> after{tier->record(stream)};
    const Ticket left = tier->copy_out(*block, source.data(), {WaitPoint::kCaller, after});
    stash.hold(Stash::prepare(stream), {nullptr, std::move(source), left, stream}, 100 * kBytes);
  }
  tier->run_all();
  CHECK(static_cast<const std::byte*>(block->data())[kBytes - 1] == std::byte{7});
}

TEST_CASE("a failed copy out lets no other source go early, in a full stash or an ending one", "[ordering]") {
  const bool full = GENERATE(true, false);
  const auto tier = std::make_shared<SimulatedTier>(Schedule::kLate, 0, std::nullopt, /*deferred_compute=*/false);
  const std::optional<Block> failing = tier->try_acquire(kBytes);
  const std::optional<Block> block = tier->try_acquire(kBytes);
  const auto make = [&] {
    c10::Storage storage(c10::Storage::use_byte_size_t(), kBytes, tier->allocate(kBytes));
    std::memset(storage.mutable_data(), 7, kBytes);
    return storage;
  };
  tier->fail_copy(1);
  {
    Stash stash(*tier);
    for (const Block* each : {&*failing, &*block}) {
      c10::Storage source = make();
      const Ticket left = tier->copy_out(*each, source.data(), {});
      const c10::Stream stream = tier->current_stream();
      stash.hold(Stash::prepare(stream), {nullptr, std::move(source), left, stream}, full ? kBytes : 100 * kBytes);
    }
  }
  tier->run_all();
  CHECK(static_cast<const std::byte*>(block->data())[kBytes - 1] == std::byte{7});
}

TEST_CASE("what comes next is prefetched, within the window, in reverse order of saving", "[ordering]") {
  OrderingWorld world(Schedule::kLate, 0, {.window_bytes = 2 * kBytes});
  std::vector<std::unique_ptr<SavedStorage::Use>> uses;
  for (float value = 0; value < 6; ++value) {
    uses.push_back(world.save(world.make(value)));
  }
  static_cast<void>(uses[5]->get());
  CHECK(world.runtime->residency().window().now_bytes() == 2 * kBytes);
  CHECK(world.runtime->residency().stats().fetched.tensors == 3);
  static_cast<void>(uses[4]->get());
  CHECK(world.runtime->residency().stats().fetched.tensors == 4);
  static_cast<void>(uses[3]->get());
  static_cast<void>(uses[2]->get());
  CHECK(world.runtime->residency().stats().fetched.tensors == 6);
  CHECK(world.runtime->residency().window().peak_bytes() == 2 * kBytes);
}

}  // namespace ebb

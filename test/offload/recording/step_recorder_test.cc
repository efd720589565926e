// What is recorded of a step's memory, from figures that are given by hand.

#include "offload/recording/step_recorder.h"

#include <cstdint>
#include <memory>
#include <optional>

#include <ATen/Functions.h>
#include <catch2/catch.hpp>

#include "test/offload/parity.h"

namespace ebb {
namespace {

// A device and what ebb holds of it.
struct World {
  std::shared_ptr<SimulatedTier> tier = make_tier(late());
  std::shared_ptr<DeviceAccount> account = std::make_shared<DeviceAccount>(/*record_timeline=*/false);
  DeviceUse use;
  int asked = 0;
  StepRecorder recorder{tier, account,
                        [this] {
                          ++asked;
                          return use;
                        },
                        /*step=*/1};

  void device_has(std::uint64_t bytes) { use = {bytes, bytes}; }
};

TEST_CASE_METHOD(NoLeak, "what is just being saved is memory that the forward pass uses, until it lets go of it") {
  World world;
  const at::Tensor first = at::empty({10}, at::kByte);
  const at::Tensor second = at::empty({20}, at::kByte);
  world.device_has(15);
  CHECK(world.recorder.saved(first.storage(), Recompute::kNo, {}) == 0);
  std::optional<Gauge::Lease> held = world.account->held.hold(10);  // ebb counts a storage once it is decided about
  world.device_has(35);
  CHECK(world.recorder.saved(second.storage(), Recompute::kNo, {}) == 1);
  held.reset();
  world.device_has(25);
  world.recorder.backward_begins();
  world.recorder.needed(1);
  world.recorder.needed(0);
  const std::optional<StepRecord> record = world.recorder.finish().record;
  REQUIRE(record);
  REQUIRE(record->other.size() >= 2);
  CHECK(record->other[0].bytes == 35);  // at its peak, until the second save
  CHECK(record->other[1].bytes == 25);  // the second is the forward pass's, and the first is ebb's
}

TEST_CASE_METHOD(NoLeak, "a step that is disturbed asks for nothing more, and gives no record") {
  World world;
  const at::Tensor tensor = at::empty({10}, at::kByte);
  static_cast<void>(world.recorder.saved(tensor.storage(), Recompute::kNo, {}));
  world.recorder.backward_begins();
  world.recorder.disturb();
  const int asked = world.asked;
  world.recorder.needed(0);
  world.recorder.released(0);
  CHECK_FALSE(world.recorder.finish().record);
  CHECK(world.asked == asked);
}

TEST_CASE_METHOD(NoLeak, "what one run makes is recorded together, with the run's time and memory") {
  World world;
  std::vector<at::Tensor> saved;
  for (int i = 0; i < 4; ++i) {
    saved.push_back(at::empty({10}, at::kByte));
    const std::uint64_t run = i == 1 ? 0 : 7;
    const Recompute recompute = i == 3 ? Recompute::kNo : Recompute::kComputeBound;
    static_cast<void>(world.recorder.saved(saved[i].storage(), recompute, {}, {}, run));
    world.recorder.kept(i);
  }
  world.device_has(100);
  world.recorder.backward_begins();
  world.recorder.needed(2);
  {
    const StepRecorder::ClockPause run(&world.recorder, 2);
    world.use = {100, 125};
  }
  world.recorder.needed(0);
  { const StepRecorder::ClockPause nothing_to_run(&world.recorder, 0); }
  const std::optional<StepRecord> record = world.recorder.finish().record;
  REQUIRE(record);
  CHECK(record->storages[0].made_with == 2);
  CHECK(record->storages[1].made_with == StorageRecord::kAlone);
  CHECK(record->storages[2].made_with == 0);
  CHECK(record->storages[3].made_with == StorageRecord::kAlone);  // nothing makes it again
  CHECK(record->storages[2].recompute_bytes == 5);                // of 25, less two of 10 bytes
  CHECK(record->storages[0].recompute_bytes == 5);
  CHECK(record->storages[0].recompute_ms == record->storages[2].recompute_ms);
}

TEST_CASE_METHOD(NoLeak, "what a recipe takes for itself is recorded, with what is in use when its result is needed") {
  World world;
  at::Tensor saved = at::empty({40}, at::kByte);
  world.device_has(140);
  {
    const auto held = world.account->held.hold(40);
    static_cast<void>(world.recorder.saved(saved.storage(), Recompute::kMemoryBound, {}));
  }
  saved.reset();
  world.device_has(100);
  world.recorder.backward_begins();
  world.recorder.needed(0);
  std::optional<DeviceAccount::Held> held;
  {
    const StepRecorder::ClockPause recipe(&world.recorder, 0);
    held.emplace(world.account, 40, DeviceAccount::Held::What::kRecomputed);
    world.use = {140, 165};
  }
  world.use = {140, 200};  // by backward, behind it
  held.reset();
  world.recorder.released(0);
  const std::optional<StepRecord> record = world.recorder.finish().record;
  REQUIRE(record);
  CHECK(record->storages[0].bytes == 40);
  CHECK(record->storages[0].recompute_bytes == 25);
  CHECK(record->storages[0].other_bytes == 100);
}

}  // namespace
}  // namespace ebb

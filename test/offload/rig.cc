#include "test/offload/rig.h"

#include <exception>
#include <thread>
#include <utility>

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <catch2/catch.hpp>

#include "policy/policies.h"

namespace ebb {
namespace {

Setting simulated(std::string name, Schedule schedule, std::uint64_t seed = 0) {
  Setting setting;
  setting.name = std::move(name);
  setting.options.policy = offload_everything();
  setting.schedule = schedule;
  setting.seed = seed;
  return setting;
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

std::vector<Setting> some_settings() { return {late_without_stash(), disk(), all_settings()[4]}; }

std::shared_ptr<SimulatedTier> make_tier(const Setting& setting) {
  if (!setting.schedule) {
    return nullptr;
  }
  return std::make_shared<SimulatedTier>(*setting.schedule, setting.seed, setting.options.capacity_bytes,
                                         /*deferred_compute=*/false);
}

std::unique_ptr<Offloader> make_offloader(const Setting& setting, std::shared_ptr<SimulatedTier> tier) {
  return tier == nullptr ? std::make_unique<Offloader>(setting.options)
                         : std::make_unique<Offloader>(setting.options, std::move(tier));
}

Rig::Rig(const Setting& setting) : simulated_(make_tier(setting)), offloader_(make_offloader(setting, simulated_)) {}

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

std::unique_ptr<OffloadGuard> guard_on(Rig& rig) { return std::make_unique<OffloadGuard>(rig.offloader()); }

std::uint64_t seen_by(const Rig& rig) {
  const at::AutoGradMode with_grad(true);
  const std::uint64_t before = rig.stats().saved.tensors;
  (at::rand({4}).requires_grad_() * 2).pow(2);
  return rig.stats().saved.tensors - before;
}

}  // namespace ebb

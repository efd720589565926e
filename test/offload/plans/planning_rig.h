#pragma once

#include <cstdint>

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>

#include <catch2/catch.hpp>

#include "test/offload/metered_device.h"
#include "test/offload/parity.h"

// What the tests of planned steps share: a network, and devices with room for a part of it.
namespace ebb {

inline constexpr std::uint64_t kMatrix = 64 * 64 * sizeof(float);
inline constexpr int kLayers = 12;
inline constexpr int kUntilPlanned = 2;   // steps
inline constexpr int kUntilSettled = 10;  // after which none is recorded any more

inline Setting planned(const DeviceBudget& budget, MeteredDevice* device = nullptr) {
  Setting setting = disk();
  setting.options.policy = nullptr;
  setting.options.stash_bytes.reset();
  setting.options.device_budget = budget;
  setting.options.planned_minimum_bytes = kMatrix;
  if (device != nullptr) {
    setting.options.device_meter = device->meter();
  }
  return setting;
}

// What a chain of matmuls and activations learns: it saves two matrices a layer, one of which can be recomputed.
inline at::Tensor network(Inputs& in, std::int64_t rows = 64) {
  at::Tensor x = in.activation({rows, 64});
  for (int i = 0; i < kLayers; ++i) {
    x = at::silu(x.matmul(in.leaf({64, 64})));
  }
  return in.loss(x);
}

inline Tensors train_step(Offloader* offloader, std::int64_t rows = 64) {
  Inputs in;
  const Run run(offloader);
  const auto guard = run.guard();
  network(in, rows).backward();
  return in.gradients();
}

inline std::uint64_t plain_peak(MeteredDevice& device, std::int64_t rows = 64) {
  train_step(nullptr, rows);
  device.start_peak();
  train_step(nullptr, rows);
  return device.peak();
}

inline std::uint64_t moved(const Rig& rig) { return rig.stats().offloaded.tensors + rig.stats().dropped.tensors; }

// How many storages the step moves or drops.
inline std::uint64_t moved_by_step(Rig& rig, std::int64_t rows = 64) {
  const std::uint64_t before = moved(rig);
  train_step(&rig.offloader(), rows);
  return moved(rig) - before;
}

inline std::uint64_t least_peak(MeteredDevice& device) {
  Rig rig(planned(LeastMemory{}, &device));
  for (int step = 0; step < kUntilPlanned; ++step) {
    train_step(&rig.offloader());
  }
  return rig.offloader().plan_report().value().predicted.peak_bytes;
}

// Between the least and what plain training takes, at this share of the way.
inline std::uint64_t between(MeteredDevice& device, double share) {
  const std::uint64_t least = least_peak(device);
  return least + static_cast<std::uint64_t>(share * static_cast<double>(plain_peak(device) - least));
}

}  // namespace ebb

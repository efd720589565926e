#include "bench/step_measure.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <stdexcept>

#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>

#include "bench/device.h"
#include "offload/offloader.h"

namespace ebb {
namespace {

void synchronize(c10::Device device) {
  if (device.is_cuda()) {
    c10::cuda::device_synchronize();
  }
}

double time_step(StepWorkload& workload, Offloader* offloader, c10::Device device) {
  synchronize(device);
  const auto start = std::chrono::steady_clock::now();
  workload.step(offloader);
  synchronize(device);
  const std::chrono::duration<double, std::milli> ms = std::chrono::steady_clock::now() - start;
  return ms.count();
}

std::uint64_t device_allocations(c10::Device device) {
  return device.is_cuda() ? static_cast<std::uint64_t>(
                                c10::cuda::CUDACachingAllocator::getDeviceStats(device.index()).num_device_alloc)
                          : 0;
}

}  // namespace

Options config_options(const std::string& name, const Options& options) {
  Options chosen = options;
  if (name == "none") {
    chosen.enabled = false;
  } else if (name == "blocking") {
    chosen.copies = Copies::kOnComputeStream;
  } else if (name != "offload") {
    throw std::invalid_argument("unknown configuration \"" + name + "\": there are none, blocking, offload");
  }
  return chosen;
}

StepTimes time_pairs(StepWorkload& workload, Offloader* offloader, int warm_up, int pairs, c10::Device device) {
  StepTimes times;
  for (int i = 0; i < warm_up; ++i) {
    time_step(workload, nullptr, device);
    time_step(workload, offloader, device);
  }
  for (int i = 0; i < pairs; ++i) {
    times.none_ms.push_back(time_step(workload, nullptr, device));
    times.config_ms.push_back(time_step(workload, offloader, device));
  }
  return times;
}

StepMemory measure_memory(StepWorkload& workload, Offloader* offloader, c10::Device device) {
  DeviceMemory memory(device);
  StepMemory result;
  workload.step(offloader, [&] {
    if (offloader != nullptr) {
      offloader->drain();
    }
    synchronize(device);
    result.after_forward_bytes = memory.now_bytes();
  });
  memory.reset();  // draining by hand has changed the step that was just run
  workload.step(offloader);
  synchronize(device);
  result.peak_bytes = memory.peak_bytes();
  return result;
}

bool gradients_equal(StepWorkload& workload, Offloader& offloader) {
  const std::vector<at::Tensor> expected = workload.step(nullptr);
  const std::vector<at::Tensor> actual = workload.step(&offloader);
  return std::equal(expected.begin(), expected.end(), actual.begin(), actual.end(),
                    [](const at::Tensor& a, const at::Tensor& b) { return a.equal(b); });
}

SteadyState run_steadily(StepWorkload& workload, Offloader& offloader, int steps, c10::Device device) {
  constexpr int kFirstSteps = 2;  // in which pools grow
  for (int i = 0; i < kFirstSteps; ++i) {
    workload.step(&offloader);
  }
  const std::uint64_t growths = offloader.stats().pool_growths;
  const std::uint64_t allocations = device_allocations(device);
  SteadyState result{.steps = steps};
  for (int i = 0; i < steps; ++i) {
    workload.step(&offloader);
    result.most_pool_bytes_between_steps =
        std::max(result.most_pool_bytes_between_steps, offloader.stats().pool.now_bytes);
  }
  synchronize(device);
  result.pool_growths = offloader.stats().pool_growths - growths;
  result.device_allocations = device_allocations(device) - allocations;
  return result;
}

double percentile(std::vector<double> values, double fraction) {
  std::sort(values.begin(), values.end());
  const double at = fraction * static_cast<double>(values.size() - 1);
  const auto below = static_cast<std::size_t>(std::floor(at));
  const std::size_t above = std::min(below + 1, values.size() - 1);
  return values[below] + (at - std::floor(at)) * (values[above] - values[below]);
}

}  // namespace ebb

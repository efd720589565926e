#include "bench/step/measure.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <utility>

#include <ATen/ops/empty_like.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <c10/core/Event.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAStream.h>

#include "examples/common/bytes.h"
#include "examples/common/device.h"
#include "offload/offloader.h"
#include "policy/policies.h"
#include "streams/gpu/cuda_event.h"

namespace ebb {
namespace {

// From its making to `stop`, as the device sees it: on a GPU, what lies between the two points on the current stream;
// on the CPU, time itself.
class DeviceClock {
 public:
  explicit DeviceClock(c10::Device device) : device_(device) { record(start_event_); }

  void stop() {
    stop_ = std::chrono::steady_clock::now();
    record(stop_event_);
  }

  // Requires that it was stopped and that the device has come to that point.
  [[nodiscard]] double ms() const {
    return device_.is_cuda() ? start_event_->elapsedTime(*stop_event_)
                             : std::chrono::duration<double, std::milli>(stop_ - start_).count();
  }

 private:
  void record(std::optional<c10::Event>& event) const {
    if (device_.is_cuda()) {
      event.emplace(device_.type(), c10::EventFlag::BACKEND_DEFAULT);
      event->record(c10::cuda::getCurrentCUDAStream(device_.index()).unwrap());
    }
  }

  const c10::Device device_;
  std::optional<c10::Event> start_event_;
  std::optional<c10::Event> stop_event_;
  const std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
  std::chrono::steady_clock::time_point stop_;
};

struct StepTime {
  double forward_ms;
  double whole_ms;
};

StepTime time_step(StepWorkload& workload, StepMethod method, c10::Device device) {
  using Clock = std::chrono::steady_clock;
  using Ms = std::chrono::duration<double, std::milli>;
  synchronize(device);
  DeviceClock clock(device);
  const auto start = Clock::now();
  workload.step(method, {.before_backward = [&] { clock.stop(); }});
  synchronize(device);
  return {clock.ms(), Ms(Clock::now() - start).count()};
}

std::uint64_t device_allocations(c10::Device device) {
  return device.is_cuda() ? static_cast<std::uint64_t>(
                                c10::cuda::CUDACachingAllocator::getDeviceStats(device.index()).num_device_alloc)
                          : 0;
}

std::optional<std::string> after(const std::string& prefix, const std::string& name) {
  return name.starts_with(prefix) ? std::optional(name.substr(prefix.size())) : std::nullopt;
}

// "A,B" as its words.
OperationNames names_of(const std::string& list) {
  OperationNames names;
  std::istringstream words(list);
  for (std::string word; std::getline(words, word, ',');) {
    names.insert(word);
  }
  return names;
}

std::optional<DeviceBudget> budget_of(const std::string& name) {
  if (name == "least") {
    return LeastMemory{};
  }
  if (const auto size = after("budget:", name)) {
    return DeviceBytes{parse_bytes(*size)};
  }
  if (const auto fraction = after("slowdown:", name)) {
    return Slowdown{std::stod(*fraction)};
  }
  return std::nullopt;
}

}  // namespace

Options config_options(const std::string& name, const Options& options) {
  Options chosen = options;
  if (name == "none") {
    chosen.enabled = false;
  } else if (name == "lean") {
    constexpr std::uint64_t kLeanBytes = std::uint64_t{512} << 20;
    constexpr std::uint64_t kLeanMinimumBytes = 4 << 10;
    chosen.stash_bytes = options.stash_bytes.value_or(kLeanBytes);
    chosen.window_bytes = options.window_bytes.value_or(kLeanBytes);
    chosen.policy = minimum_size(kLeanMinimumBytes);
  } else if (name == "recompute") {
    const std::shared_ptr<Policy> keep = only_operations({});
    chosen.policy = minimum_size(kDefaultMinimumBytes, recompute(Recompute::kMemoryBound, keep));
  } else if (name == "mix") {
    chosen.policy = minimum_size(kDefaultMinimumBytes, recompute(Recompute::kMemoryBound));
  } else if (name == "evict") {
    chosen.policy = keep_everything();
  } else if (name == "checkpoint") {
    chosen.enabled = false;
  } else if (const auto operations = after("operations:", name)) {
    chosen.policy = only_operations(names_of(*operations));
  } else if (const std::optional<DeviceBudget> budget = budget_of(name)) {
    chosen.device_budget = budget;
    chosen.device_budget_is_a_wish = true;
  } else if (name != "offload") {
    throw std::invalid_argument("unknown configuration \"" + name +
                                "\": there are none, offload, lean, recompute, mix, evict, checkpoint, "
                                "operations:NAME,NAME..., budget:SIZE, slowdown:FRACTION, least");
  }
  return chosen;
}

StepMethod config_method(const std::string& name, Offloader& offloader) {
  const bool checkpoints = name == "checkpoint";
  return {checkpoints || name == "none" ? nullptr : &offloader, checkpoints};
}

StepTimes time_pairs(StepWorkload& workload, StepMethod method, int warm_up, int pairs, c10::Device device) {
  StepTimes times;
  for (int i = 0; i < warm_up; ++i) {
    time_step(workload, nullptr, device);
    const StepTime time = time_step(workload, method, device);
    if (i == 0) {
      times.first_config_ms = time.whole_ms;
    }
  }
  for (int i = 0; i < pairs; ++i) {
    // Each is the first of every other pair, so that neither is always the one that follows the other.
    for (const bool none : {i % 2 == 0, i % 2 == 1}) {
      const StepTime time = time_step(workload, none ? StepMethod(nullptr) : method, device);
      (none ? times.none_ms : times.config_ms).push_back(time.whole_ms);
      if (!none) {
        times.config_forward_ms.push_back(time.forward_ms);
      }
    }
  }
  return times;
}

StepMemory measure_memory(StepWorkload& workload, StepMethod method, DeviceMemory& memory, c10::Device device) {
  StepMemory result;
  // First, for draining by hand makes copies wait that would not, in that step and in those that learn from it.
  memory.reset();
  workload.step(method);
  synchronize(device);
  result.peak_bytes = memory.peak_bytes();
  const auto after_head = [&] {
    synchronize(device);
    result.undrained_after_forward_bytes = memory.now_bytes();
    if (method.offloader != nullptr) {
      method.offloader->drain();
    }
    synchronize(device);
    result.after_forward_bytes = memory.now_bytes();
  };
  workload.step(method, {.after_head = after_head});
  return result;
}

std::uint64_t largest_peak(StepWorkload& workload, StepMethod method, int steps, DeviceMemory& memory,
                           c10::Device device) {
  memory.reset();
  for (int i = 0; i < steps; ++i) {
    workload.step(method);
  }
  synchronize(device);
  return memory.peak_bytes();
}

double gradient_norm(StepWorkload& workload, StepMethod method) {
  double squares = 0;
  for (const at::Tensor& gradient : workload.step(method)) {
    const double norm = at::linalg_vector_norm(gradient, 2, {}, /*keepdim=*/false, at::kDouble).item<double>();
    squares += norm * norm;
  }
  return std::sqrt(squares);
}

std::map<double, int> gradient_norms(StepWorkload& workload, StepMethod method, int steps) {
  std::map<double, int> counts;
  for (int i = 0; i < steps; ++i) {
    ++counts[gradient_norm(workload, method)];
  }
  return counts;
}

bool same_bits(const at::Tensor& a, const at::Tensor& b) {
  return a.contiguous().view(at::kByte).equal(b.contiguous().view(at::kByte));
}

// In host memory: on the device they would leave a plan less of its budget than it has in the steps that are timed.
std::vector<at::Tensor> expected_gradients(StepWorkload& workload) {
  std::vector<at::Tensor> gradients = workload.step(nullptr);
  for (at::Tensor& gradient : gradients) {
    const bool pinned = gradient.is_cuda();
    gradient = at::empty_like(gradient, gradient.options().device(at::kCPU).pinned_memory(pinned)).copy_(gradient);
  }
  return gradients;
}

bool gradients_equal(const std::vector<at::Tensor>& expected, StepWorkload& workload, StepMethod method) {
  const auto same = [](const at::Tensor& a, const at::Tensor& b) { return same_bits(a.to(b.device()), b); };
  constexpr int kSteps = 10;
  for (int i = 0; i < kSteps; ++i) {
    const std::vector<at::Tensor> actual = workload.step(method);
    if (!std::equal(expected.begin(), expected.end(), actual.begin(), actual.end(), same)) {
      return false;
    }
  }
  return true;
}

SteadyState run_steadily(StepWorkload& workload, Offloader& offloader, int steps, c10::Device device) {
  constexpr int kFirstSteps = 2;  // in which pools grow
  for (int i = 0; i < kFirstSteps; ++i) {
    workload.step(&offloader);
  }
  const std::uint64_t growths = offloader.stats().pool_growths;
  const std::uint64_t allocations = device_allocations(device);
  const std::uint64_t events = CudaEventPool::made();
  SteadyState result{.steps = steps};
  for (int i = 0; i < steps; ++i) {
    workload.step(&offloader);
    result.most_pool_bytes_between_steps =
        std::max(result.most_pool_bytes_between_steps, offloader.stats().pool.now_bytes);
  }
  synchronize(device);
  result.pool_growths = offloader.stats().pool_growths - growths;
  result.device_allocations = device_allocations(device) - allocations;
  result.events_made = CudaEventPool::made() - events;
  return result;
}

}  // namespace ebb

#include "bench/fits_trial.h"

#include <algorithm>
#include <chrono>
#include <vector>

#include <c10/util/Exception.h>

#include "bench/device.h"
#include "bench/percentile.h"
#include "bench/step_measure.h"
#include "bench/step_workload.h"
#include "offload/offloader.h"

namespace ebb {
namespace {

Trial train(const LlamaShape& shape, at::ScalarType dtype, const std::string& config, const Options& options, int steps,
            DeviceMemory& memory, c10::Device device) {
  using Clock = std::chrono::steady_clock;
  using Ms = std::chrono::duration<double, std::milli>;
  constexpr std::size_t kTimed = 2;
  StepWorkload workload({"fits", shape}, dtype, device);
  Offloader offloader(config_options(config, options));
  const StepMethod method = config_method(config, offloader);
  std::vector<double> ms;
  for (int i = 0; i < steps; ++i) {
    const auto start = Clock::now();
    workload.step(method);
    synchronize(device);
    ms.push_back(Ms(Clock::now() - start).count());
  }
  ms.erase(ms.begin(), ms.end() - static_cast<std::ptrdiff_t>(std::min(kTimed, ms.size())));
  return {memory.peak_bytes(), percentile(ms, 0.5)};
}

}  // namespace

std::optional<Trial> try_training(const LlamaShape& shape, at::ScalarType dtype, const std::string& config,
                                  const Options& options, int steps, DeviceMemory& memory, c10::Device device) {
  std::optional<Trial> result;
  memory.reset();
  try {
    result = train(shape, dtype, config, options, steps, memory, device);
  } catch (const c10::OutOfMemoryError&) {
    // The answer.
  }
  synchronize(device);
  memory.reset();  // gives all of it back
  return result;
}

}  // namespace ebb

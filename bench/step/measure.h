#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include "bench/step/workload.h"
#include "offload/options.h"

namespace ebb {

class DeviceMemory;
class Offloader;

// The options of a configuration that is measured beside plain autograd: "none" (an offloader that is switched off),
// "offload" (`options` as they are), "lean" (small saves move too, and stash and window have 512 MiB each unless
// `options` says otherwise: less memory for more time), "recompute" (what is memory-bound is recomputed, and the rest
// kept), "mix" (as "recompute", but the rest moves), "evict" (all is kept until the device has no memory left), or a
// plan for a budget: "slowdown:0.02", "budget:12GB" (of all device memory) or "least". Or by a policy alone, whatever
// the size: "operations:SiluBackward0,MulBackward0" (what these nodes made moves). Or "checkpoint": ebb moves nothing,
// and every block is checkpointed. Throws std::invalid_argument for another name.
Options config_options(const std::string& name, const Options& options);

// The method that goes with the configuration of this name. `offloader` has that configuration's options.
StepMethod config_method(const std::string& name, Offloader& offloader);

struct StepTimes {
  double first_config_ms = 0;  // of the very first step, in which pools grow and no order is known yet
  std::vector<double> none_ms;
  std::vector<double> config_ms;          // of the step right before or after each of `none_ms`
  std::vector<double> config_forward_ms;  // of each, on the compute stream until backward begins
};

// Steps of none and of the configuration in turn, after `warm_up` of each, at least one. Which of a pair runs first
// alternates.
StepTimes time_pairs(StepWorkload& workload, StepMethod method, int warm_up, int pairs, c10::Device device);

struct StepMemory {
  // The memory right after the head's linear, logits included: as a step leaves it when all copies are done, and after
  // `drain`, which lets go of the sources that ebb would keep until its next call.
  std::uint64_t undrained_after_forward_bytes = 0;
  std::uint64_t after_forward_bytes = 0;
  std::uint64_t peak_bytes = 0;  // over a whole step
};

// `memory` must have been made before the workload.
StepMemory measure_memory(StepWorkload& workload, StepMethod method, DeviceMemory& memory, c10::Device device);

// The most device memory in any of so many steps. `memory` as above.
std::uint64_t largest_peak(StepWorkload& workload, StepMethod method, int steps, DeviceMemory& memory,
                           c10::Device device);

// The 2-norm over all gradients of a step, summed in double precision: to be compared with the norms of other programs.
double gradient_norm(StepWorkload& workload, StepMethod method);

// How often each norm came out in `steps` steps. In default mode plain autograd does not agree with itself on a GPU: a
// norm that is far from all norms of plain autograd is wrong, and only many steps show how far plain autograd's norms
// are apart.
std::map<double, int> gradient_norms(StepWorkload& workload, StepMethod method, int steps);

// Compares bytes: at::equal takes +0 for -0, and no NaN for itself.
[[nodiscard]] bool same_bits(const at::Tensor& a, const at::Tensor& b);

// Plain autograd's gradients, in host memory.
std::vector<at::Tensor> expected_gradients(StepWorkload& workload);

// Whether all gradients of ten consecutive steps equal the reference, bit for bit: the first learns the order of reads,
// the others follow it and reuse blocks, from the third on copies may start early, and a plan is followed, and the last
// follow a plan that was corrected by what its first steps took.
// Deterministic algorithms must be on: on a GPU, plain autograd does not even agree with itself otherwise.
bool gradients_equal(const std::vector<at::Tensor>& expected, StepWorkload& workload, StepMethod method);

// Counts over `steps` steps of events that must not happen in steady state.
struct SteadyState {
  int steps = 0;
  std::uint64_t pool_growths = 0;                   // asked the system for host memory
  std::uint64_t device_allocations = 0;             // cudaMalloc
  std::uint64_t events_made = 0;                    // cudaEventCreate
  std::uint64_t most_pool_bytes_between_steps = 0;  // leaked blocks
};

SteadyState run_steadily(StepWorkload& workload, Offloader& offloader, int steps, c10::Device device);

}  // namespace ebb

#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "bench/llama_config.h"

namespace ebb {

// A workload of the step benchmark: the model, and what a step feeds it.
struct StepShape {
  std::string name;
  LlamaConfig model;
  std::int64_t batch = 0;
  std::int64_t sequence = 0;
};

// "w1": Llama-3-8B with 9 layers, batch 8, sequence 1024. "small": a quarter of its width. "tiny": for a CPU.
const std::vector<StepShape>& step_shapes();

// Throws std::invalid_argument that names the shapes there are.
StepShape step_shape(const std::string& name);

}  // namespace ebb

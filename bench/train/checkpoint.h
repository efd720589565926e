#pragma once

#include <cstdint>
#include <filesystem>
#include <string>

#include <c10/core/Device.h>

namespace torch::optim {
class Optimizer;
}

namespace ebb {

class Llama;

// Weights, optimizer state, sizes and the number of steps done, in one torch::serialize archive. The file appears
// whole or not at all. Throws std::runtime_error that names the file.
void save_checkpoint(const std::filesystem::path& file, const Llama& model, const torch::optim::Optimizer& optimizer,
                     const std::string& dtype, std::int64_t steps_done);

// Fills model and optimizer, whatever sequence length the two runs have; returns the steps done. Throws
// std::runtime_error that names the file if it is not a checkpoint or lacks a part, and the size and both its values if
// the checkpoint is of another model.
std::int64_t load_checkpoint(const std::filesystem::path& file, Llama& model, torch::optim::Optimizer& optimizer,
                             const std::string& dtype, c10::Device device);

}  // namespace ebb

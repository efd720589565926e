#pragma once

#include <cstdint>
#include <filesystem>
#include <string>

namespace torch::optim {
class AdamW;
}

namespace ebb {

class Llama;

// Weights, AdamW's moments, sizes and the number of steps done, as a tensor file (examples/train/tensor_file.h), which
// ends in a checksum. The file appears whole or not at all. Throws std::runtime_error that names the file.
void save_checkpoint(const std::filesystem::path& file, const Llama& model, torch::optim::AdamW& optimizer,
                     const std::string& dtype, std::int64_t steps_done);

// Fills model and optimizer, on whatever device and whatever sequence length the two runs have; returns the steps done.
// Learning rate and weight decay stay those of this run. Throws std::runtime_error that names the file if it is not a
// checkpoint, is damaged or lacks a part; if the checkpoint is of another model, the error names the size that differs
// and both its values.
// Memory is allocated for the model's sizes only, never for what the file says.
std::int64_t load_checkpoint(const std::filesystem::path& file, Llama& model, torch::optim::AdamW& optimizer,
                             const std::string& dtype);

}  // namespace ebb

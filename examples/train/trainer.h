#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <string_view>

#include <c10/core/Device.h>

#include "examples/train/options.h"

namespace ebb {

class Llama;
class Offloader;

// The model, its optimizer and its batches: everything that a step changes or reads. Whether saved activations leave
// the device is up to the Offloader that each step is given.
class Trainer {
 public:
  // Starts from the options' seed, or from the checkpoint if the options name one. The text must outlive this object.
  // Throws std::invalid_argument or std::runtime_error with one sentence for options, text or checkpoint that do not
  // fit.
  Trainer(const TrainOptions& options, std::string_view text, c10::Device device);
  ~Trainer();
  Trainer(const Trainer&) = delete;
  Trainer& operator=(const Trainer&) = delete;

  // Has the offloader keep weights and gradients, the optimizer's states, or both at home, as the options say.
  void manage(Offloader& offloader, const TrainOptions& options);

  // Forward, backward and update on the batch of `index`; returns the loss. Waits for the device.
  float step(std::int64_t index, Offloader& offloader);

  // Forward and backward of a step without the update, for looking at the step's memory.
  float forward_backward(std::int64_t index, Offloader& offloader);

  // The step to begin with: 0, or the step after the checkpoint's last.
  [[nodiscard]] std::int64_t first_step() const;

  // Writes a checkpoint of a run that has done `steps_done` steps.
  void save(const std::filesystem::path& file, std::int64_t steps_done) const;

  // Text that the model makes up after `prompt`. Equal weights and seeds give equal text.
  std::string sample(const std::string& prompt, std::int64_t bytes);

  [[nodiscard]] Llama& model();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace ebb

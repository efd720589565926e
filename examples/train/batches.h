#pragma once

#include <cstdint>
#include <string_view>

#include <ATen/core/Tensor.h>

namespace ebb {

// Random crops of a text: what a step reads, and the same bytes shifted by one, which it is to predict.
//
// A batch depends on the seed and the step's index alone, so a second run and a resumed one see the same batches, and
// nothing that LibTorch draws can shift them.
class Batches {
 public:
  struct Batch {
    at::Tensor inputs;   // int64 [batch, seq], on the CPU
    at::Tensor targets;  // as inputs
  };

  // The text must outlive this. Throws std::invalid_argument where it is shorter than one batch.
  Batches(std::string_view text, std::int64_t batch, std::int64_t seq, std::uint64_t seed);

  [[nodiscard]] Batch at(std::int64_t step) const;

 private:
  std::string_view text_;
  std::int64_t batch_;
  std::int64_t seq_;
  std::uint64_t seed_;
};

}  // namespace ebb

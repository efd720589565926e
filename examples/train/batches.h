#pragma once

#include <cstdint>
#include <string_view>

#include <ATen/core/Tensor.h>

namespace ebb {

// Random crops of a text: the bytes that a step reads, and those bytes shifted by one, which the step is to predict.
//
// A batch depends on the seed and the step's index alone, so a second run and a resumed run see the same batches, and
// LibTorch's random numbers cannot shift them.
class Batches {
 public:
  struct Batch {
    at::Tensor inputs;   // int64 [batch, seq], on the CPU
    at::Tensor targets;  // as inputs
  };

  // The text must outlive this object. Throws std::invalid_argument where the text is shorter than one batch.
  Batches(std::string_view text, std::int64_t batch, std::int64_t seq, std::uint64_t seed);

  [[nodiscard]] Batch at(std::int64_t step) const;

 private:
  std::string_view text_;
  std::int64_t batch_;
  std::int64_t seq_;
  std::uint64_t seed_;
};

}  // namespace ebb

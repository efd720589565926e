#pragma once

#include <cstdint>

#include "policy/step_record.h"

namespace ebb {

// How the figures of a step grow with the bytes of one of its storages, which is the step's size: from the figures of
// two steps of unlike sizes that run the same operations.
//
// Note [Steps of one structure]
// Batches are often of unlike lengths, and their steps run the same operations. Most storages' bytes then do not
// change, or are some bytes and so many for each token (a batch's, without the last token of each sample, say); those
// of an attention's weights grow with the square of the length. So two steps tell the bytes of any other to the byte.
// Other memory is taken to grow in the same ways. Times are those of the step nearest in size, all in one proportion:
// that of the steps' whole times, on the line through the two of them.
class Growth {
 public:
  // The bytes that are the size, in the two steps, which differ, and in the step that is asked about.
  Growth(std::uint64_t one, std::uint64_t other, std::uint64_t asked) : one_(one), other_(other), asked_(asked) {}

  // Whether the two tell of the size: they differ by a tenth and more, or noise would pass for growth, and the size is
  // from half of the smaller to five quarters of the larger.
  [[nodiscard]] bool is_known() const;

  // Whether the size of the first step is the nearer one.
  [[nodiscard]] bool is_nearer_to_one() const;

  // The bytes in the step that is asked about of what has these bytes in the two. 0 bytes in one of the two mean that
  // the program held the bytes itself: the other step then tells them, in proportion.
  [[nodiscard]] std::uint64_t bytes(std::uint64_t in_one, std::uint64_t in_other) const;

  // The same of other memory, which may have parts that do not grow, and parts that grow with the square: no less than
  // in the smaller step.
  [[nodiscard]] std::uint64_t other_bytes(std::uint64_t in_one, std::uint64_t in_other) const;

  // The time in that step of what takes these times in the two.
  [[nodiscard]] double ms(double in_one, double in_other) const;

 private:
  std::uint64_t one_;
  std::uint64_t other_;
  std::uint64_t asked_;
};

// The record of the step that is asked about. Requires records of as many storages, with backward passes that take
// time.
[[nodiscard]] StepRecord resized(const StepRecord& one, const StepRecord& other, const Growth& growth);

}  // namespace ebb

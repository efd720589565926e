#pragma once

namespace ebb {

// The backward pass that the calling thread is running, as LibTorch numbers backward passes; -1 for none.
[[nodiscard]] int backward_here();

// How many backward passes run in the process right now, those that started inside of others included.
[[nodiscard]] int backward_passes();

// Counts as a backward pass as long as it lives.
class CountedBackward {
 public:
  CountedBackward();
  ~CountedBackward();
  CountedBackward(const CountedBackward&) = delete;
  CountedBackward& operator=(const CountedBackward&) = delete;
};

[[nodiscard]] inline bool in_backward() { return backward_here() != -1; }

}  // namespace ebb

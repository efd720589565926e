#pragma once

#include <c10/core/Storage.h>

namespace ebb {

// How to make a storage's bytes again.
//
// Threads: `run` on one at a time.
class Recipe {
 public:
  virtual ~Recipe() = default;
  Recipe(const Recipe&) = delete;
  Recipe& operator=(const Recipe&) = delete;

  // How many recipes run one inside the other to have the bytes; at least 1.
  [[nodiscard]] int depth() const { return depth_; }

  // The bytes, made by work on the calling thread's current stream.
  // Throws what getting an input throws, and what the operation does, c10::OutOfMemoryError among it; it may then be
  // called again.
  [[nodiscard]] c10::Storage run();

  // Whether one runs on the calling thread.
  [[nodiscard]] static bool runs_here();

 protected:
  explicit Recipe(int depth) : depth_(depth) {}

 private:
  [[nodiscard]] virtual c10::Storage make() = 0;

  const int depth_;
};

}  // namespace ebb

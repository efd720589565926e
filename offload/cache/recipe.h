#pragma once

#include <c10/core/Storage.h>

namespace ebb {

// How to make a storage's bytes again.
//
// Threads: `run` may be called from any thread, but only one thread at a time.
class Recipe {
 public:
  virtual ~Recipe() = default;
  Recipe(const Recipe&) = delete;
  Recipe& operator=(const Recipe&) = delete;

  // How many recipes run one inside the other to make the bytes; at least 1.
  [[nodiscard]] int depth() const { return depth_; }

  // Makes the bytes by work on the calling thread's current stream and returns them. Throws the errors of fetching an
  // input and of the operation, c10::OutOfMemoryError among them; the caller may then call run() again.
  [[nodiscard]] c10::Storage run();

  // Whether a recipe runs on the calling thread.
  [[nodiscard]] static bool runs_here();

 protected:
  explicit Recipe(int depth) : depth_(depth) {}

 private:
  [[nodiscard]] virtual c10::Storage make() = 0;

  const int depth_;
};

}  // namespace ebb

#pragma once

#include <memory>

namespace ebb {

// Lives while the calling thread runs a backward pass, from before it begins until it is over. The engine that ebb
// installs makes one for each pass that goes through LibTorch's default engine; Python's backward goes to its own, so
// whoever binds ebb makes them there. One inside of another is harmless.
//
// Without one gradients are right all the same, but a budget is never planned, no copy in starts before the first
// unpack, and what was lent to backward stays until the device has no memory left.
class Backward {
 public:
  Backward();
  ~Backward();
  Backward(const Backward&) = delete;
  Backward& operator=(const Backward&) = delete;

  // The pass has failed. Needs no call where an exception ends this.
  void fail();

 private:
  struct Parts;
  std::unique_ptr<Parts> parts_;
};

}  // namespace ebb

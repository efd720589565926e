#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include <c10/core/Storage.h>

#include "policy/policy.h"

namespace ebb {

class SavedStorage;

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
  [[nodiscard]] bool is_too_deep() const { return depth_ > kMaxRecipeDepth; }

  [[nodiscard]] virtual Recompute cost() const = 0;

  // What it begins from of what ebb has saved.
  [[nodiscard]] virtual std::vector<const SavedStorage*> inputs() const = 0;

  // Equal for recipes that do the same, whatever the sizes.
  [[nodiscard]] virtual std::uint64_t identity() const = 0;

  // The number of the run in which recipes make their bytes together; 0: this one runs by itself.
  [[nodiscard]] virtual std::uint64_t run_of_several() const { return 0; }

  // Whether the program itself has said that the bytes can be made again.
  [[nodiscard]] virtual bool is_given() const { return false; }

  // Whether nobody can write, unseen, to what the recipe begins from and autograd does not check.
  [[nodiscard]] virtual bool is_safe() const { return true; }

  // Copies what the recipe begins from that nothing else keeps. To be called once, in the operation that the recipe was
  // found in. Throws c10::OutOfMemoryError.
  virtual void settle() {}

  // Where what would run again has not ended its first run: calls `end` when it has, with whether the recipe may be
  // run, and returns true. Otherwise the bytes may be let go of at once.
  virtual bool at_end(std::function<void(bool may_run)> /*end*/) { return false; }

  // Makes the bytes by work on the calling thread's current stream and returns them, in a storage that nobody else has.
  // Throws the errors of fetching an input and of the operation, c10::OutOfMemoryError among them; the caller may then
  // call run() again.
  [[nodiscard]] c10::Storage run();

  // Whether a recipe that runs by itself runs on the calling thread. (The others run the program's own code.)
  [[nodiscard]] static bool runs_here();

 protected:
  explicit Recipe(int depth) : depth_(depth) {}
  void run_inside_of(int depth) { depth_ = std::max(depth_, depth + 1); }

 private:
  [[nodiscard]] virtual c10::Storage make() = 0;

  int depth_;
};

// Makes the recipe of one save; null for none. Empty: the log of operations is asked.
using MakeRecipe = std::function<std::unique_ptr<Recipe>()>;

}  // namespace ebb

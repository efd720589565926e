#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include "offload/guard.h"
#include "offload/offloader.h"
#include "test/offload/rig.h"

namespace ebb {

// Runs programs once with plain autograd and then with an Offloader, and asks for the same bits.
//
// In this binary all CPU tensors come from a SimulatedDeviceAllocator, which poisons what is freed: a tensor that ebb
// does not hold for as long as a copy needs it turns into NaN at once.

using Tensors = std::vector<at::Tensor>;

// How a program runs: with an offloader, or plain. Then its guards are null.
class Run {
 public:
  explicit Run(Offloader* offloader) : offloader_(offloader) {}
  [[nodiscard]] std::unique_ptr<OffloadGuard> guard() const {
    return offloader_ == nullptr ? nullptr : std::make_unique<OffloadGuard>(*offloader_);
  }
  [[nodiscard]] std::unique_ptr<NoOpGuard> no_op() const {
    return offloader_ == nullptr ? nullptr : std::make_unique<NoOpGuard>();
  }
  [[nodiscard]] Offloader* offloader() const { return offloader_; }

 private:
  Offloader* const offloader_;
};

// Returns all that it computed.
using Program = std::function<Tensors(const Run&)>;

struct Outcome {
  Tensors tensors;
  std::string error;  // what the program threw, without a backtrace
};

[[nodiscard]] Outcome outcome(const Program& program, const Run& run);
[[nodiscard]] inline Outcome plain(const Program& program) { return outcome(program, Run(nullptr)); }

// After an error, autograd's queue of this thread still holds the nodes that were ready to run, until the next backward
// drops them. This is one; outcome() runs it.
void forget_failed_backward();

// Same error; same bits, dtypes, sizes and strides.
void check_same(const Outcome& expected, const Outcome& found);

// Runs the program under each setting, twice, and checks that it does what plain autograd does and leaves nothing.
void expect_parity(const Program& program);
void expect_parity(const Program& program, const Setting& setting);

// How much of an error's text must be the same.
enum class Words : std::uint8_t {
  kAll,
  kButProducer,  // all but "which is output 0 of X": LibTorch keeps a saved tensor whole and asks it who made it after
                 // a write; where the tensor is gone, ebb knows only who had made it when it was saved
};

// The same for a program that plain autograd answers with an error, which contains `part`.
void expect_same_error(const Program& program, const std::string& part, Words words = Words::kAll);

// Seeded inputs of a program, the same in each run.
class Inputs {
 public:
  Inputs();

  // A tensor that is trained: it requires a gradient, and ebb never moves it.
  at::Tensor leaf(at::IntArrayRef sizes, at::ScalarType dtype = at::kFloat);

  // A tensor made from a leaf, which ebb may move. Its making saves nothing.
  at::Tensor activation(at::IntArrayRef sizes, at::ScalarType dtype = at::kFloat);

  // Values without a gradient.
  at::Tensor constant(at::IntArrayRef sizes, at::ScalarType dtype = at::kFloat);

  // A sum of all values of `tensor`, each with a random weight.
  at::Tensor loss(const at::Tensor& tensor);

  [[nodiscard]] Tensors gradients() const;

 private:
  at::Generator random_;
  Tensors leaves_;
};

using Forward = std::function<at::Tensor(Inputs&)>;

// The forward's output and the gradients of all leaves, by a backward inside the guard or outside of it.
[[nodiscard]] Program train(Forward forward, bool backward_in_guard);

// Expects parity of `train` in both ways, and that activations really moved away and back.
void expect_gradient_parity(const Forward& forward);

// Runs a forward under the guard and a backward of its sum after it, and returns what the rig has counted since it was
// made or reset.
[[nodiscard]] Stats counted(Rig& rig, const Forward& forward);

// Checks that a test leaves no tensor behind, as a graph that owns itself would.
class NoLeak {
 public:
  NoLeak();
  ~NoLeak();
  NoLeak(const NoLeak&) = delete;
  NoLeak& operator=(const NoLeak&) = delete;

 private:
  const std::uint64_t bytes_before_;
};

}  // namespace ebb

#pragma once

#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string_view>
#include <variant>
#include <vector>

#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/Device.h>
#include <c10/util/Exception.h>

#include "offload/guard.h"
#include "offload/offloader.h"
#include "test/random/foreign_hooks.h"
#include "test/random/managed_leaves.h"
#include "test/random/program.h"
#include "test/random/record.h"

namespace ebb::graphs {

// Where a program runs: with two offloaders, or with none, plain.
struct Ground {
  c10::Device device{c10::kCPU};
  std::vector<Offloader*> offloaders;
  std::optional<ManagedLeaves> managed;  // by the first offloader
};

// Tensors without gradients that all threads of a program may read, and save, but not write.
[[nodiscard]] Tensors make_shared_tensors(c10::Device device);

// What each thread of a program has while it runs. LibTorch's warnings are not heard: that create_graph makes cycles,
// say. finish() breaks them.
//
// MKL computes with one thread from the first line on. A new thread learns at::set_num_threads() only from its first
// parallel operation of LibTorch's, which a copy of an offloader's may be; a product's bits depend on it.
class ProgramThread {
 public:
  ProgramThread() { at::init_num_threads(); }

 private:
  struct Handler : c10::WarningHandler {
    void process(const c10::Warning& /*warning*/) override {}
  };
  Handler handler_;
  const c10::WarningUtils::WarningHandlerGuard guard_{&handler_};
};

// Runs one thread of a program, a line at a time. Must be used and destroyed on one thread.
class Interpreter {
 public:
  Interpreter(Ground ground, const Tensors& shared);
  ~Interpreter();
  Interpreter(const Interpreter&) = delete;
  Interpreter& operator=(const Interpreter&) = delete;

  // Returns the result, undefined if there is none. An error is a record, and the thread goes on.
  at::Tensor step(const Instruction& line);

  // Records the value as it is now, and lets go of it.
  void release(int id);

  // Leaves all scopes, releases what is left and records the leaves' gradients.
  void finish();

  [[nodiscard]] std::vector<Record>& records() { return records_; }

  // Those that are known.
  [[nodiscard]] Tensors values(const std::vector<int>& ids) const;

 private:
  using Guarded = std::unique_ptr<OffloadGuard>;
  using Unguarded = std::unique_ptr<NoOpGuard>;
  using NoGrad = std::unique_ptr<at::NoGradGuard>;
  struct Foreign {
    std::unique_ptr<ForeignHooks> hooks;
    std::unique_ptr<ForeignScope> scope;
  };
  struct Scope {
    std::string_view name;
    std::variant<std::monostate, Guarded, Unguarded, NoGrad, Foreign> held;  // nothing in plain autograd's run
    std::unique_ptr<ForeignScope> over_foreign = nullptr;                    // of guard and no_op
  };

  at::Tensor run(const Instruction& line);
  at::Tensor run_region(const Instruction& line, const Tensors& operands);
  [[nodiscard]] RegionFunction in_region(RegionFunction function, std::uint32_t how, int id) const;
  at::Tensor crowd(const Instruction& line, const at::Tensor& x);
  void write_gradients(const Instruction& line);
  at::Tensor make(const Instruction& line);
  void manage(const at::Tensor& leaf);
  void scope(const Instruction& line);
  at::Tensor backward(const Instruction& line);
  void backward_into_leaves(const Instruction& line, const Tensors& roots, const Tensors& gradients);
  at::Tensor gradients_of(const Instruction& line, const Tensors& roots, const Tensors& gradients);
  [[nodiscard]] bool may_run(const Instruction& line, const Tensors& operands) const;
  [[nodiscard]] int first_known(const std::vector<int>& ids) const;  // one must be
  [[nodiscard]] bool is_guarded() const;
  [[nodiscard]] bool is_shared(const at::Tensor& tensor) const;

  const ProgramThread thread_;
  const Ground ground_;
  const Tensors& shared_;
  // Note [After a failed backward]
  // Autograd's queue of this thread still holds the nodes that were ready to run, and with them their graph, until
  // later backwards of this thread have taken them out. It takes the youngest node first, so this one is older than
  // all.
  at::Tensor broom_;
  Tensors given_other_data_;
  std::set<int> gradients_;    // values that are
  bool may_swap_data_ = true;  // until there is a graph of gradients, or a gradient is a parameter itself
  std::map<int, at::Tensor> values_;
  std::vector<std::pair<int, at::Tensor>> leaves_;
  Tensors crowd_;  // whose graphs stay alive
  const std::shared_ptr<Calls> calls_ = std::make_shared<Calls>();
  bool may_run_twice_at_once_ = true;
  bool are_calls_alike_ = true;  // with ebb and without: no region of ebb's has run
  std::vector<Scope> scopes_;
  std::vector<Record> records_;
};

// Runs all threads of the program.
[[nodiscard]] Outcome run(const Program& program, const Ground& ground);

}  // namespace ebb::graphs

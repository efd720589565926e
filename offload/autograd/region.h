#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/autograd/saved_variable_hooks.h>

#include "offload/autograd/thread_setting.h"
#include "offload/checkpointed_function.h"
#include "offload/tensors/lent_tensor.h"
#include "offload/tensors/remembered_tensor.h"
#include "offload/tensors/version_check.h"
#include "streams/base/mutex.h"
#include "streams/base/process_mark.h"

namespace ebb {

class RegionInStep;

// One call of checkpoint(): what its second run needs, and the second run's saves that nobody has taken yet.
//
// Ownership: the hooks of the first run's saves own the region, so the region ends when backward is over or the graph
// is dropped. A region whose function runs only once ends after that run. The region alone holds the saves of the
// second run, whose own graph is dropped at once.
//
// Threads: every member may be called from any thread.
class Region : public std::enable_shared_from_this<Region> {
 public:
  // Saves the inputs, as autograd would save them here.
  Region(CheckpointedFunction function, const std::vector<at::Tensor>& inputs, EarlyStop early_stop);
  ~Region();

  // Makes a region. An outermost region under a guard also asks the plan of the guard's offloader, if there is a plan.
  static std::shared_ptr<Region> make(CheckpointedFunction function, const std::vector<at::Tensor>& inputs,
                                      EarlyStop early_stop);

  // Runs the function in forward and returns its outputs. This run is the only one if the plan keeps the region's
  // saves.
  static std::vector<at::Tensor> run(const std::shared_ptr<Region>& region, const std::vector<at::Tensor>& inputs);

  [[nodiscard]] bool first_run_is_over() const { return first_run_is_over_; }

  // The hook for a save that is made now on the calling thread; null if the save is left to what lies outside of
  // regions.
  static std::unique_ptr<torch::autograd::SavedVariableHooks> hook_here();

  // Adds a save of the first run, and returns its place.
  std::size_t add(const at::Tensor& saved);

  // Takes the next save of the second run. Returns true, at most once a run, if the function is to be left: with
  // EarlyStop::kYes, where nobody can ask for a later save, and the operation has filled what it saved (Note [Saved
  // before it is filled] in deferred_copies.h). `is_filled`: whether that is known of this save. Throws c10::Error if
  // the first run saved no tensor of these sizes and dtype in that place.
  [[nodiscard]] bool collect(const at::Tensor& saved, bool is_filled);

  // The tensor that the second run has saved in this place; the region then no longer holds the tensor. Runs the
  // function a second time first, unless the region holds the tensor already, or the last taker still has it. Throws
  // c10::Error if the second run saves other tensors than the first, and in a child that was forked meanwhile.
  [[nodiscard]] at::Tensor take(std::size_t place);

  // Says that no hook will ask for this place any more.
  void drop(std::size_t place);

 private:
  [[nodiscard]] at::Tensor find(std::size_t place);
  void run_again() EBB_REQUIRES(run_mutex_);
  [[nodiscard]] std::uint64_t collected_bytes(const std::vector<at::Tensor>& inputs);

  struct Save {
    std::vector<std::int64_t> sizes;
    at::ScalarType dtype;
    bool alive = true;
    RememberedTensor taken = {};                                // the second run's tensor, once taken
    std::optional<VersionCheck> second_version = std::nullopt;  // of the second run's tensor, at its save
  };

  // Which memory an input had. The references are weak, and keep the addresses from being used again while this lives.
  class InputMemory {
   public:
    explicit InputMemory(const at::Tensor& input);

    // Whether the program still has the tensor, over another storage.
    [[nodiscard]] bool has_been_replaced() const;

   private:
    using WeakStorage = c10::weak_intrusive_ptr<c10::StorageImpl>;
    const WeakTensor input_;
    const WeakStorage storage_;
  };

  const ProcessMark process_;
  const CheckpointedFunction function_;
  const EarlyStop early_stop_;
  const ThreadSetting setting_;
  std::vector<torch::autograd::SavedVariable> inputs_;
  std::vector<InputMemory> input_memory_;
  std::vector<std::size_t> same_input_;  // the first input that is the same tensor
  std::vector<bool> input_needs_gradient_;
  std::unique_ptr<RegionInStep> planned_;  // null without a plan

  bool draws_ = true;  // whether the function draws random numbers; set at the end of the first run
  std::atomic<bool> first_run_is_over_{false};

  Mutex run_mutex_ EBB_ACQUIRED_BEFORE(mutex_);  // held over the function's second run
  Mutex mutex_;
  std::vector<Save> saves_ EBB_GUARDED_BY(mutex_);                           // of the first run
  std::vector<std::optional<at::Tensor>> collected_ EBB_GUARDED_BY(mutex_);  // of the second run
  std::size_t next_ EBB_GUARDED_BY(mutex_) = 0;                              // place of the second run's next save
  std::size_t last_alive_ EBB_GUARDED_BY(mutex_) = 0;                        // when the second run began
  bool is_left_ EBB_GUARDED_BY(mutex_) = false;                              // the second run
  std::uint64_t next_node_ EBB_GUARDED_BY(mutex_) = 0;                       // after the node of the last save
  bool operation_fills_ EBB_GUARDED_BY(mutex_) = false;                      // whether it may fill what it has saved
};

}  // namespace ebb

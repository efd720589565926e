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

class PlannedRegion;

// One call of checkpoint(): what its second run takes, and what that has saved and nobody has used yet.
//
// Owned by the hooks of what the first run saved, and so gone when backward is over or the graph is dropped; or when
// the only run is over. What the second run saves in its own graph is held here only: that graph goes at once.
//
// Threads: every member may be called from any thread.
class Region : public std::enable_shared_from_this<Region> {
 public:
  // Saves the inputs, as autograd would save them here.
  Region(CheckpointedFunction function, const std::vector<at::Tensor>& inputs);
  ~Region();

  // The same, and asks the plan of the guard around it, if there is one, and this is in no other region.
  static std::shared_ptr<Region> make(CheckpointedFunction function, const std::vector<at::Tensor>& inputs);

  // The first run; the only one, if the plan has what it saves stay.
  static std::vector<at::Tensor> run(const std::shared_ptr<Region>& region, const std::vector<at::Tensor>& inputs);

  [[nodiscard]] bool first_run_is_over() const { return first_run_is_over_; }

  // The hook for a save that is made now on the calling thread; null if that is in no region.
  static std::unique_ptr<torch::autograd::SavedVariableHooks> hook_here();

  // The place of a save of the first run.
  std::size_t add(const at::Tensor& saved);

  // A save of the second run.
  void collect(const at::Tensor& saved);

  // What the second run has saved in this place, and no longer holds. Runs it, unless it has been run and nobody has
  // taken this one, or who took it has it still. Throws c10::Error in a child that was
  // forked meanwhile.
  [[nodiscard]] at::Tensor take(std::size_t place);

  // No hook will ask for this place any more.
  void drop(std::size_t place);

 private:
  [[nodiscard]] at::Tensor find(std::size_t place);
  void run_again() EBB_REQUIRES(run_mutex_);
  [[nodiscard]] std::uint64_t collected_bytes(const std::vector<at::Tensor>& inputs);

  struct Save {
    std::vector<std::int64_t> sizes;
    at::ScalarType dtype;
    bool alive = true;
    RememberedTensor taken = {};                                // of the second run's, as the next
    std::optional<VersionCheck> second_version = std::nullopt;  // when it was saved
  };

  // Which memory an input had. Weak: the address is not used again while this lives.
  class InputMemory {
   public:
    explicit InputMemory(const at::Tensor& input);

    // The program still has the tensor, over another storage.
    [[nodiscard]] bool has_been_replaced() const;

   private:
    using WeakStorage = c10::weak_intrusive_ptr<c10::StorageImpl>;
    const WeakTensor input_;
    const WeakStorage storage_;
  };

  const ProcessMark process_;
  const CheckpointedFunction function_;
  const ThreadSetting setting_;
  std::vector<torch::autograd::SavedVariable> inputs_;
  std::vector<InputMemory> input_memory_;
  std::vector<bool> input_needs_gradient_;
  std::unique_ptr<PlannedRegion> planned_;  // null without a plan

  bool draws_ = true;  // random numbers. Set at the end of the first run
  std::atomic<bool> first_run_is_over_{false};

  Mutex run_mutex_ EBB_ACQUIRED_BEFORE(mutex_);  // held over the function's second run
  Mutex mutex_;
  std::vector<Save> saves_ EBB_GUARDED_BY(mutex_);                           // of the first run
  std::vector<std::optional<at::Tensor>> collected_ EBB_GUARDED_BY(mutex_);  // of the second run
  std::size_t next_ EBB_GUARDED_BY(mutex_) = 0;                              // place of the second run's next save
};

}  // namespace ebb

#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>

#include "offload/cache/recipe.h"
#include "offload/recompute/operation_log.h"
#include "offload/steps/saved_storage.h"
#include "policy/policy.h"

namespace ebb {

// The recipe of a storage that logged operations made: these operations, and the values that they begin from.
//
// Note [Operations again]
// A recipe makes the same bits, because it runs the same operations on the same bits with the same sizes, strides and
// offsets, below autograd and autocast, with random generators in the same state. It begins from values that autograd
// has saved, which so are there until backward has come past them, and from copies of small ones. A write is run on a
// copy of what it is to write to.
//
// Beyond what autograd asks of a program, a recipe asks the following:
// - The saved values that it begins from must not be written to before its last use. Backward raises LibTorch's error
//   for a write, also where plain autograd would not have checked the value. They may be given other data (set_data):
//   the recipe has the memory that was saved. If that memory is resized or swapped, backward raises an error of ebb's.
// - Settings that decide how an operation computes (TF32, determinism, the number of CPU threads, kernels that
//   torch.library replaces) must be in backward as they were in forward.
// - Other threads must not draw from a generator that a recipe draws from meanwhile.
// Nothing is dropped for a recipe before it has made the same bytes in the backward pass of an earlier step (Decider).
class LogRecipe final : public Recipe {
 public:
  // The recipe for the storage of `tensor`, which the calling thread's log has, as its bytes are now. Null if there is
  // none, or where an operation ran on another stream than the current one.
  //
  // Note [Values that nobody saves]
  // A norm's cast to float32 is saved, and the sum before it is not: to make the cast again, all layers before would
  // have to run. So a recipe may begin from what the program holds now, if what lies before takes arithmetic. Such a
  // value has at least `least_bytes`, or there is none, and no more bytes than the storage. The value has to be saved
  // with the recipe, and may have a recipe of its own: save_values(). The program may write to the memory, as without
  // ebb: where the log sees the write, the bytes are copied before (SavedStorage::part_from_source). The log sees none
  // once the guard has ended, so what the program still holds then is copied, too. That may take memory, so only a
  // recipe is believed whose values the program had let go of when backward came (is_safe). Backward raises LibTorch's
  // error for a write that nobody has seen: another thread's, or a compiled function's.
  [[nodiscard]] static std::unique_ptr<LogRecipe> find(const OperationLog& log, const at::Tensor& tensor,
                                                       std::optional<std::size_t> least_bytes = std::nullopt);

  [[nodiscard]] Recompute cost() const override { return cost_; }
  [[nodiscard]] std::vector<const SavedStorage*> inputs() const override;

  // Of the same operations on tensors of the same dtypes.
  [[nodiscard]] std::uint64_t identity() const override { return identity_; }

  // A value that the recipe begins from.
  struct Root {
    ValueId value;
    LoggedOperation::TensorArgument like;
    std::shared_ptr<const OperationLog::Save> save;  // null: of a value that autograd has not saved
    std::optional<SavedStorage::Use> use;            // where a SavedStorage has the bytes
    c10::Storage storage;                            // where not
    std::optional<c10::VariableVersion> version;     // of what save_values() saves; else settle() copies the bytes
    std::uint32_t version_was = 0;
  };
  [[nodiscard]] const std::vector<std::unique_ptr<Root>>& roots() const { return roots_; }

  // The recipe for a value that another recipe begins from and that autograd has not saved. Null as above, and where
  // the value has no gradient.
  [[nodiscard]] static std::unique_ptr<LogRecipe> find(const OperationLog& log, const Root& root,
                                                       std::size_t least_bytes);

  // Has `save` save each value that the recipe begins from and that autograd does not save; `save` tells how many
  // recipes run one inside the other to make the value again. `proof`: of this recipe; each value gets a number of its
  // own for a proof. To be called once, before the other members, in the operation that the recipe was found in.
  struct SavedValue {
    std::shared_ptr<SavedStorage> storage;
    int depth;
  };
  using SaveValue = std::function<SavedValue(const Root& root, std::uint64_t proof)>;
  void save_values(std::uint64_t proof, const SaveValue& save);

  [[nodiscard]] bool is_safe() const override;
  void settle() override;

 private:
  class Search;

  explicit LogRecipe(int depth) : Recipe(depth) {}
  static void check(const Root& root);
  [[nodiscard]] c10::Storage make() override;
  using Bytes = std::map<ValueId, c10::Storage>;
  [[nodiscard]] Bytes begin() const;
  [[nodiscard]] c10::Storage run_on(Bytes have) const;

  std::vector<std::shared_ptr<const LoggedOperation>> operations_;
  std::vector<std::unique_ptr<Root>> roots_;
  ValueId result_ = kNoValue;
  c10::Device device_ = c10::kCPU;
  std::size_t bytes_ = 0;
  Recompute cost_ = Recompute::kMemoryBound;
  std::uint64_t identity_ = 0;
};

// A copy of the bytes, or of the tensor with these strides, made on the current stream.
[[nodiscard]] c10::Storage copy_of(const c10::Storage& storage);
[[nodiscard]] c10::Storage copy_of(const at::Tensor& tensor, c10::IntArrayRef strides);

// Whether the two, on one device, have the same bytes. The calling thread waits for the device.
[[nodiscard]] bool same_bytes(const c10::Storage& one, const c10::Storage& other);

}  // namespace ebb

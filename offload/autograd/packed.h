#pragma once

#include <memory>
#include <optional>

#include <ATen/core/Tensor.h>

#include "offload/autograd/guard_scope.h"
#include "offload/report/device_account.h"
#include "offload/tensors/saved_tensor.h"

namespace ebb {

struct RegionSaves;

// Note [CUDA graphs]
// A graph that is captured holds addresses, and is replayed when ebb knows nothing of it. So what is saved while the
// current stream is captured stays as it is, whatever a policy or a plan would say: the graph's own memory. What was
// moved before the capture began cannot be had during it, which is one clear error; what has not left the device can.

// One save of a tensor, for any saved-tensor hook to own: to construct it is to pack, `unpack` is to unpack, and its
// destructor is the end of the save. All that is known of the save is here.
//
// Threads: `unpack` may be called any number of times, on any thread, also several at once.
class Packed {
 public:
  // `target`: where the save goes; not null, and its scope must live until this returns. `region`: the checkpointed
  // region that runs and whose saves stay, whatever the policy would say; null for none.
  // Throws what Runtime::save throws, and c10::Error in a forked child.
  Packed(const at::Tensor& tensor, const GuardScope::Target& target, RegionSaves* region);
  ~Packed();
  Packed(const Packed&) = delete;
  Packed& operator=(const Packed&) = delete;

  // The tensor that was saved, ready for work on the calling thread's current stream. Where a recipe looks for its
  // inputs on this thread (recipe_input.h), the recipe gets another save of the tensor, and the result is without
  // bytes. Throws c10::Error if the tensor has been written to since, and what SavedStorage::Use::get throws.
  [[nodiscard]] at::Tensor unpack();

 private:
  std::optional<SavedTensor> saved_;
  std::optional<DeviceAccount::Held> held_;  // where the policy passed the save through
};

}  // namespace ebb

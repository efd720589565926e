#pragma once

#include <memory>
#include <optional>

#include <ATen/core/Tensor.h>

#include "offload/accounts/device_account.h"
#include "offload/autograd/guard_scope.h"
#include "offload/tensors/saved_tensor.h"

namespace ebb {

class Runtime;
struct RegionSaves;

// Note [CUDA graphs]
// A captured graph holds addresses, and ebb does not know when the graph is replayed. So tensors that are saved while
// the current stream is captured stay as they are, in the graph's own memory, whatever a policy or a plan would say. A
// storage that left the device before the capture began cannot be unpacked during the capture, which is one clear
// error. A storage that has not left the device can be unpacked.

// One save of a tensor, for any saved-tensor hook to own: the constructor packs, `unpack` unpacks, and the destructor
// ends the save. All that is known of the save is here.
//
// Threads: `unpack` may be called any number of times, on any thread, also several at once.
class Packed {
 public:
  // `target`: where the save goes; its runtime is not null, and its scope must live until the constructor returns.
  // `region`: the checkpointed region that runs and whose saves stay, whatever the policy would say; null for none.
  // Throws what Runtime::save throws, and c10::Error in a forked child.
  Packed(const at::Tensor& tensor, const GuardScope::Target& target, RegionSaves* region);
  ~Packed();
  Packed(const Packed&) = delete;
  Packed& operator=(const Packed&) = delete;

  // The tensor that was saved, ready for work on the calling thread's current stream. Where the device has no memory,
  // other storages are evicted, and what they leave is tried. Throws c10::Error if the tensor has been written to since
  // it was saved, and what SavedStorage::Use::get throws.
  [[nodiscard]] at::Tensor unpack();

  // As SavedTensor's.
  [[nodiscard]] std::unique_ptr<SavedTensor> for_recipe() const { return saved_->for_recipe(); }

 private:
  std::shared_ptr<Runtime> runtime_;  // null where the save is passed through
  std::optional<SavedTensor> saved_;
  std::optional<DeviceAccount::Held> held_;  // where the policy passed the save through
};

}  // namespace ebb

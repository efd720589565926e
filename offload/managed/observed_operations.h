#pragma once

#include <functional>
#include <memory>
#include <vector>

#include <ATen/core/ATen_fwd.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>

#include "offload/managed/managed_set.h"
#include "offload/managed/postponed_work.h"

namespace ebb {

// Note [How operations are observed]
// A managed tensor has one more dispatch key, TESTING_ONLY_GenericMode, which no backend uses. The dispatcher then
// calls our boxed fallback for every operation that takes the tensor, in forward, in backward and outside of both, on
// any thread: the fallback brings the bytes of all managed storages among the arguments, and goes on to the operation's
// own kernels. Views inherit the key, and so do shallow copies, as those that autograd saves. Tensors without the key
// cost nothing, and neither does a thread. Operations inside of a composite operation are observed as well, because the
// key is not excluded for them.
//
// What reads memory without an operation (data_ptr(), numpy(), torch::save), or through a tensor that was made before
// the storage was managed, gets c10::Error while the bytes are away.
//
// An operation on lists of tensors (_foreach_mul_, _fused_adamw_) does the same to each of them. Where the storages of
// all take more than the set's bound, the operation runs on a part of the lists after the other.
//
// What a program makes with zeros_like and the like, without gradients and outside of backward, from a managed leaf
// that requires gradients is managed, too: so optimizers make their states.

// Has the set manage the tensor's storage, with a home of its own, and operations on the tensor and on its future views
// be observed. Other tensors of the same storage, such as tied weights, need the call, too, and get the same home. The
// bytes stay where they are until the set sends them home. `slot`: as for ManagedSet::add. Has no effect on a tensor
// that is smaller than the set's minimum. Throws std::invalid_argument for a tensor that has no dense storage of its
// own on the set's device, c10::Error where the tier has no room, where another set manages the storage, or where an
// operation of another thread is using a storage that stayed where it is so far.
void manage(const std::shared_ptr<ManagedSet>& set, const at::Tensor& tensor, const ManagedSet::Slot& slot = nullptr);

// As manage(), for a tensor whose storage stays where it is, and gets no home: the set manages only what belongs to it.
void manage_around(const std::shared_ptr<ManagedSet>& set, const at::Tensor& tensor);

// Has operations on the tensor be observed from now on, so that manage() knows of those under way. The storage stays
// where it is. Returns false, and does nothing, where an operation that is not observed may be using the tensor:
// somebody else refers to it than the caller and one more. Threads: any.
[[nodiscard]] bool watch(const std::shared_ptr<ManagedSet>& set, const at::Tensor& tensor);

// Whether the tensor's storage has a home, which not all storages of observed tensors have.
[[nodiscard]] bool has_home(const at::Tensor& tensor);

// Ends what manage() has begun for the tensors' storages, and for the states that optimizers have made of them: their
// bytes are brought to the device and stay there. What was put off is done first, and throws. Storages that the set
// does not manage do not matter. Throws as operations on the tensors would; some storages are then released.
void release(const std::shared_ptr<ManagedSet>& set, at::TensorList tensors);

// As the first manage(), but where the set has no room for the tensor's home, the tensor stays, which costs memory
// only. The set's first such refusal is logged. Returns false, and does nothing, while an operation is using a tensor
// that is watched.
bool try_to_manage(const std::shared_ptr<ManagedSet>& set, const at::Tensor& tensor,
                   const ManagedSet::Slot& slot = nullptr);

// Has the set that manages the one tensor manage the other, too. Has no effect where none does, or where the other is
// nothing that the set takes.
void manage_beside(const at::Tensor& managed, const at::Tensor& other);

// Throws c10::Error where the tensor is managed and its set's current stream captures a CUDA graph.
void refuse_capture(const at::Tensor& managed);

// Puts work on these tensors off until any of them, or of their storages' other tensors, is used next (PostponedWork
// has the contract). Returns false, and does nothing, unless all of them are managed and come and go: then no use can
// be missed. The same where one of `others` has the target's storage, which could not end then. Work on them that was
// put off before is done first, and throws. Throws c10::Error in a CUDA graph's capture.
[[nodiscard]] bool postpone(const at::Tensor& target, at::TensorList others,
                            std::function<void(const at::Tensor&, const std::vector<at::Tensor>&)> work,
                            PostponedWork::TargetUse target_use = PostponedWork::TargetUse::kWritten);

// As postpone(), for work that uses the bytes at home if that is possible by then, on this or on another thread. Their
// copies home begin now, and nothing is fetched ahead of its use until the work is done. Where the work is to use the
// bytes on the device, `prepare_on_device`, unless null, is called first, with the target and the first of `others`
// there: if it throws, the work has not begun, and the next use tries again. Work on these tensors that was put off
// before is done first in any case. Returns null where postpone() returns false.
[[nodiscard]] std::shared_ptr<PostponedWork> postpone_at_home(
    const at::Tensor& target, at::TensorList others, PostponedWork::Work work,
    PostponedWork::TargetUse target_use = PostponedWork::TargetUse::kWritten,
    std::function<void()> prepare_on_device = nullptr);

// Has the bytes of these tensors on the device while it lives, and does not let them go in between, whatever the bound
// is: for several operations in a row on the same few tensors. Tensors that are not managed do not matter.
//
// Throws as an operation on them would. Threads: any; ends where it began.
class OnDevice {
 public:
  explicit OnDevice(at::TensorList tensors);
  ~OnDevice();
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

 private:
  class Uses;
  const std::unique_ptr<Uses> uses_;
};

// A tensor of all bytes of a dense storage, which is observed if the storage is managed: to read what the program holds
// as a storage.
[[nodiscard]] at::Tensor bytes_of(const c10::Storage& storage);

// true: from now on whoever asks for a managed storage's address without an operation, and does not mean to write, gets
// no error, and null while the bytes are away. For as long as a profiler runs, which reads addresses and lets no error
// out.
void let_addresses_be_read(bool let);

// Lets go of the homes of storages that the program has let go of. Otherwise that happens when the next tensors are
// managed.
void forget_ended_storages();

}  // namespace ebb

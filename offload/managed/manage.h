#pragma once

#include <memory>

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>

#include "offload/managed/managed_set.h"

namespace ebb {

// Has the set manage the tensor's storage, with a home of its own, and operations on the tensor and on its future views
// be observed. Other tensors of the same storage, such as tied weights, need the call, too, and get the same home. The
// bytes stay where they are until the set sends them home. Has no effect on a tensor that is smaller than the set's
// minimum. Throws std::invalid_argument for a tensor that has no dense storage of its own on the set's device,
// c10::Error where the tier has no room, where another set manages the storage, or where an operation of another thread
// is using a storage that stayed where it is so far.
void manage(const std::shared_ptr<ManagedSet>& set, const at::Tensor& tensor);

// As manage(), for a tensor whose storage stays where it is, and gets no home: the set manages only what belongs to it.
void manage_around(const std::shared_ptr<ManagedSet>& set, const at::Tensor& tensor);

// As manage(), but where the set has no room for the tensor's home, the tensor stays, which costs memory only. The
// set's first such refusal is logged. `slot`: as for ManagedSet::add. Returns false, and does nothing, while an
// operation is using a tensor that is watched.
bool try_to_manage(const std::shared_ptr<ManagedSet>& set, const at::Tensor& tensor,
                   const ManagedSet::Slot& slot = nullptr);

// Has the set that manages a parameter manage its state, too, until release() of the parameter. Has no effect where no
// set does, or where the state is nothing that the set takes, or somebody else has its storage.
void manage_beside(const at::Tensor& parameter, const at::Tensor& state);

// A managed tensor that nobody else has.
struct ManagedCopy {
  std::shared_ptr<const void> home;  // whose end, by which nobody uses the tensor any more, ends the tensor's home
  at::Tensor tensor;                 // contiguous; undefined where there is none
};

// A copy of a tensor of the parameter's size, in the set that manages the parameter. Returns none where the set takes
// no such tensor, the device has no room for the copy, or the tier none for its home.
[[nodiscard]] ManagedCopy copy_beside(const at::Tensor& parameter, const at::Tensor& from);

// Ends what manage() has begun for the tensors' storages, and for the states that optimizers have made of them: their
// bytes are brought to the device and stay there. What was put off is done first, and throws. Storages that the set
// does not manage do not matter. Throws as operations on the tensors would; some storages are then released.
void release(const std::shared_ptr<ManagedSet>& set, at::TensorList tensors);

// Whether the tensor's storage has a home, which not all storages of observed tensors have.
[[nodiscard]] bool has_home(const at::Tensor& tensor);

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

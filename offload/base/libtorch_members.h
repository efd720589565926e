#pragma once

#include <ATen/core/TensorBase.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/TensorImpl.h>

// Note [Members that LibTorch shows nobody]
// ebb needs four private or protected members of LibTorch's classes. This unit has all accesses to them, and does not
// compile where LibTorch renames or retypes one. From LibTorch 2.11 to 2.15 no public function does the same:
// - StorageImpl has functions that make each access to the memory an error, and none that allows access again.
// - TensorImpl has setters for some of its dispatch keys, and none for another key. shallow_copy_from() takes over the
//   keys of a tensor, but writes sizes and storage as well, which another thread may be reading.
// - VariableVersion neither compares two counters nor shows the counter.

namespace ebb {

// Which accesses to its memory a storage refuses.
struct Refusals {
  bool& all;
  bool& writes;  // those that may write
};
[[nodiscard]] Refusals refusals_of(c10::StorageImpl& storage);

[[nodiscard]] c10::DispatchKeySet& key_set_of(const at::TensorBase& tensor);

// The identity of the counter, which several tensors may share.
[[nodiscard]] const void* counter_of(const c10::VariableVersion& version);

}  // namespace ebb

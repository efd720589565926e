#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/DispatchKeySet.h>

namespace ebb {

// The mark of a tensor whose storage ebb manages: one more dispatch key, which no backend uses. Views and shallow
// copies inherit the key. See Note [How operations are observed] in managed/observed_operations.h.
inline constexpr c10::DispatchKey kManagedKey = c10::DispatchKey::TESTING_ONLY_GenericMode;

[[nodiscard]] inline bool is_managed(const at::Tensor& tensor) { return tensor.key_set().has(kManagedKey); }

}  // namespace ebb

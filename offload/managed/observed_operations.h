#pragma once

namespace ebb {

// Note [How operations are observed]
// A managed tensor has one more dispatch key, TESTING_ONLY_GenericMode, which no backend uses. The dispatcher then
// calls our boxed fallback for every operation that takes the tensor, in forward, in backward and outside of both, on
// any thread: the fallback brings the bytes of all managed storages among the arguments, and goes on to the operation's
// own kernels. Views inherit the key, and so do shallow copies, as those that autograd saves. Operations inside of a
// composite operation are observed as well, because the key is not excluded for them.
//
// A thread whose operations are logged (recompute/operation_log.h) includes the key for all of them, but for those
// inside of an entry of the log. Elsewhere tensors without the key cost nothing.
//
// What reads memory without an operation (data_ptr(), numpy(), torch::save), or through a tensor that was made before
// the storage was managed, gets c10::Error while the bytes are away.
//
// An operation on lists of tensors (_foreach_mul_, _fused_adamw_) does the same to each of them. Where the storages of
// all take more than the set's bound, the operation runs on a part of the lists after the other.
//
// What an optimizer's step makes with zeros_like and the like from a managed parameter is managed, too, as it is made:
// OptimizerStep says which steps there are.
//
// Note [Why this key]
// Only a key of the dispatcher's sees each operation on some tensors and none on others, on every thread and in C++.
// LibTorch has no such key for extensions: PrivateUse1 is a device's, Python's and FuncTorch's keys are used by
// LibTorch, and a mode sees the operations of one thread on all tensors. For this key LibTorch registers nothing but in
// its own tests. The fallback is registered when the first tensor is managed, or the first thread logs, so that a
// program that does neither has no fallback, and conflicts with no other library's.

// Has the dispatcher call ebb for operations on tensors with that key from now on, in this process. To be called before
// a tensor gets the key or a thread includes the key. Threads: any. Throws c10::Error where another library has
// registered a fallback for the key.
void observe_operations();

}  // namespace ebb

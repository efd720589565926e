#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <set>
#include <string>

#include "policy/policy.h"

namespace ebb {

// The smallest storage that is worth a copy. On an H200 over PCIe gen5 x16 (bench/results/h200/link.json) a copy costs
// the link 2 to 3 us besides its bytes, and the host 2 us. So copies one after another reach 36 of the
// link's 55 GB/s at 256 KiB each, and 48 GB/s at 1 MiB each. Batches make smaller copies worth while for the link, but
// not for the host. Little is lost by keeping smaller storages: in a Llama-3-8B layer the saves below 1 MiB are 10 MB
// of 13 GB.
inline constexpr std::uint64_t kDefaultMinimumBytes = 1 << 20;

// Offloads every storage. The other policies wrap this policy by default.
[[nodiscard]] std::shared_ptr<Policy> offload_everything();

// Keeps every storage, so bytes move only by eviction when the device has no memory left
// (Options::evict_when_out_of_memory). Storages of fewer than `least_bytes` are not evicted either.
[[nodiscard]] std::shared_ptr<Policy> keep_everything(std::uint64_t least_bytes = std::uint64_t{1} << 20);

// The policies below throw std::invalid_argument if `inner` is null.

// Keeps storages smaller than `bytes`. Throws std::invalid_argument if `bytes` is over 2^56.
[[nodiscard]] std::shared_ptr<Policy> minimum_size(std::uint64_t bytes = kDefaultMinimumBytes,
                                                   std::shared_ptr<Policy> inner = offload_everything());

// Autograd nodes that made a tensor, named as `grad_fn->name()` names them ("SiluBackward0"). A tensor that no node
// made has the name "".
using OperationNames = std::set<std::string, std::less<>>;

// Keeps every storage that none of these operations made.
[[nodiscard]] std::shared_ptr<Policy> only_operations(OperationNames names,
                                                      std::shared_ptr<Policy> inner = offload_everything());

// Keeps every storage that one of these operations made.
[[nodiscard]] std::shared_ptr<Policy> except_operations(OperationNames names,
                                                        std::shared_ptr<Policy> inner = offload_everything());

// Storages whose Candidate::recompute is `dearest` or cheaper are recomputed; the others go to the inner policy. On an
// H200 in bfloat16, 1 GB costs 0.7 ms to recompute where recomputing is memory-bound, and 5 to 6 ms where it is
// compute-bound. Copying 1 GB out and in takes 18 ms, which may hide behind other work.
//
// A storage is recomputed from the second step on: the first one proves that the bytes can be made again. Note
// [Operations again] in offload/recompute/log_recipe.h says what recomputing requires of a program.
[[nodiscard]] std::shared_ptr<Policy> recompute(Recompute dearest = Recompute::kMemoryBound,
                                                std::shared_ptr<Policy> inner = offload_everything());

// Asks the user's function about each storage. A storage that the function wants offloaded goes to the inner policy;
// kKeep and kRecompute are the final decision. Candidate::operation is filled in for the function, and
// Candidate::recompute if the inner policy needs it, as recompute() does.
//
// Threads, errors: as Policy. The function is called from any thread, never from two at once; an exception of the
// function reaches the forward pass. Throws std::invalid_argument if `function` is empty.
[[nodiscard]] std::shared_ptr<Policy> callback(std::function<Decision(const Candidate&)> function,
                                               std::shared_ptr<Policy> inner = offload_everything());

}  // namespace ebb

#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/core/Storage.h>
#include <c10/core/Stream.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/SmallVector.h>
#include <c10/util/flat_hash_map.h>

#include "offload/base/operator_traits.h"
#include "offload/managed/managed_set.h"
#include "offload/managed/registry.h"

namespace ebb {

// Uses of managed storages on the device, for one operation or for several in a row: from bring() until this ends, the
// bytes do not leave, whatever the bound is. Tensors that are not managed do not matter.
//
// Note [Operations inside of an operation]
// matmul calls mm, and an update runs a dozen operations on the same few tensors. What such an inner operation takes is
// in use already by the same thread, so the bytes are there: the inner operation neither asks the registry nor counts
// as a use. That holds while both run on one stream, and as long as nobody has changed the registry since the outer use
// began, because work that was put off meanwhile has to be done first.
//
// Threads: one at a time. Ends where it began, or after leave().
class Uses {
 public:
  // kOwn: is to outlive the operation, and so leaves nothing to an outer one's uses.
  enum class Outer : bool { kOwn, kMayServe };

  explicit Uses(Outer outer = Outer::kMayServe) : outer_(outer) {}

  // Has brought these. `read`: are read only, unless an operation meanwhile says otherwise. Throws as an operation on
  // the tensors would.
  explicit Uses(at::TensorList read, at::TensorList written = {});

  ~Uses() {
    leave();
    if (!sets_.empty()) {  // of operations inside of another's uses most have none
      end();
    }
  }
  Uses(const Uses&) = delete;
  Uses& operator=(const Uses&) = delete;

  // What was put off until the tensor's use is done first, and throws.
  void add(const at::Tensor& tensor, bool written);
  void add(const c10::IValue& value, bool written);
  void add_all(c10::ArrayRef<c10::IValue> arguments, const OperatorTraits& traits);

  // To be called once, when all have been added. Operations on the calling thread are inside of these uses from then
  // on, until leave() or the end. Throws as ManagedSet::bring.
  void bring();
  void leave() {
    for (Uses** link = &innermost_; *link != nullptr; link = &(*link)->around_) {
      if (*link == this) {
        *link = around_;
        return;
      }
    }
  }

  // Whether one of the storages is on a CPU, where nothing but the program's waiting orders another thread's work.
  [[nodiscard]] bool are_on_a_cpu() const;

  // Whether the calling thread is in an operation on managed tensors.
  [[nodiscard]] static bool is_open() { return innermost_ != nullptr; }

 private:
  struct OfSet {
    std::shared_ptr<ManagedSet> set;  // destroyed after the storages
    c10::Stream stream;
    c10::SmallVector<ManagedSet::Use, 4> uses;
    bool has_more_to_prefetch = false;
  };
  struct Place {
    std::size_t set;
    std::size_t use;
  };

  void end();
  [[nodiscard]] ManagedSet::Use* use_of(const c10::StorageImpl* storage);

  static inline thread_local Uses* innermost_ = nullptr;  // of those that are open here
  Uses* around_ = nullptr;                                // the next one, while this is open

  const Outer outer_ = Outer::kMayServe;
  const std::uint64_t registry_changes_ = Registry::all().changes();
  c10::SmallVector<OfSet, 1> sets_;
  ska::flat_hash_map<const c10::StorageImpl*, Place> places_;  // of all uses
  c10::SmallVector<std::shared_ptr<const void>, 1> watched_;
};

// Whether all of the tensors are managed, come and go, are neither negated nor conjugated, and have homes that are
// memory. Only a hint: another thread may change that. Threads: any.
[[nodiscard]] bool can_be_used_at_home(at::TensorList tensors);

// Uses the tensors' bytes where their homes are, in host memory, as long as the result lives: for work of the host's,
// to which the bytes need not come. Meanwhile the device does not have the bytes, and a use there waits. The result is
// on the CPU, over the homes, of the same sizes and strides.
//
// Sends the tensors home, does what has been put off until their use, and blocks the calling thread until their copies
// are over. Returns null where that is not possible, or where one of the tensors is in use; those before have been sent
// home all the same. Throws the error of a copy that failed, and what work that was put off throws.
//
// Threads: any; the result ends on the thread that made it.
[[nodiscard]] std::shared_ptr<const std::vector<at::Tensor>> use_at_home(at::TensorList tensors);

}  // namespace ebb

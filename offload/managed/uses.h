#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <unordered_map>

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/core/Storage.h>
#include <c10/core/Stream.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/SmallVector.h>

#include "offload/managed/managed_set.h"
#include "offload/managed/operator_traits.h"
#include "offload/managed/registry.h"

namespace ebb {

// The managed storages among an operation's arguments, in use as long as this lives.
//
// Note [Operations inside of an operation]
// matmul calls mm, and an update runs a dozen operations on the same few tensors. What such an inner operation takes is
// in use already by the same thread, so the bytes are there: the inner operation neither asks the registry nor counts
// as a use. That holds while both run on one stream, and as long as nobody has changed the registry since the outer use
// began, because work that was put off meanwhile has to be done first.
//
// Threads: one at a time.
class Uses {
 public:
  // kOwn: is to outlive the operation, and so leaves nothing to an outer one's uses.
  enum class Outer : bool { kOwn, kMayServe };

  explicit Uses(Outer outer = Outer::kMayServe) : outer_(outer) {}
  ~Uses();
  Uses(const Uses&) = delete;
  Uses& operator=(const Uses&) = delete;

  // What was put off until the tensor's use is done first, and throws.
  void add(const at::Tensor& tensor, bool written);
  void add(const c10::IValue& value, bool written);
  void add_all(c10::ArrayRef<c10::IValue> arguments, const OperatorTraits& traits);

  // To be called once, when all have been added. Throws as ManagedSet::bring.
  void bring();

  // Whether one of the storages is on a CPU, where nothing but the program's waiting orders another thread's work.
  [[nodiscard]] bool are_on_a_cpu() const;

  // Has operations on the calling thread be inside of the operation, as long as this lives: from bring() on.
  class Scope {
   public:
    explicit Scope(Uses& uses);
    ~Scope();
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

    // Whether the calling thread is in an operation on managed tensors.
    [[nodiscard]] static bool is_open() { return innermost_ != nullptr; }

   private:
    friend class Uses;
    Uses& uses_;
    Scope* outer_;
    static inline thread_local Scope* innermost_ = nullptr;
  };

 private:
  struct OfSet {
    std::shared_ptr<ManagedSet> set;  // destroyed after the storages
    c10::Stream stream;
    c10::SmallVector<ManagedSet::Use, 4> uses;
    bool has_more_to_prefetch = false;
  };
  struct Place {
    const c10::StorageImpl* storage;
    std::size_t set;
    std::size_t use;
  };

  [[nodiscard]] const Place* find(const c10::StorageImpl* storage);
  [[nodiscard]] ManagedSet::Use* use_of(const c10::StorageImpl* storage);

  const Outer outer_;
  const std::uint64_t registry_changes_ = Registry::all().changes();
  c10::SmallVector<OfSet, 1> sets_;
  c10::SmallVector<Place, 4> places_;                              // of all uses
  std::unordered_map<const c10::StorageImpl*, std::size_t> many_;  // in places_, once there are more than a few
  c10::SmallVector<std::shared_ptr<Registry::Watched>, 1> watched_;
};

// Has the bytes of these tensors on the device while it lives, and does not let them go in between, whatever the bound
// is: for several operations in a row on the same few tensors. Tensors that are not managed do not matter. `read`: are
// read only, unless an operation meanwhile says otherwise.
//
// Throws as an operation on them would. Threads: any; ends where it began.
class OnDevice {
 public:
  explicit OnDevice(at::TensorList read, at::TensorList written = {});
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

 private:
  Uses uses_;
  std::optional<Uses::Scope> scope_;
};

}  // namespace ebb

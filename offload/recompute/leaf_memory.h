#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <unordered_map>

#include <c10/core/StorageImpl.h>

#include "streams/base/mutex.h"

namespace ebb {

class GraphRecipe;

// Which leaves keep their memory from the forward pass to backward, so that recipes may compute from them.
//
// Note [Leaves whose memory goes]
// FSDP2 frees a parameter's memory after the forward pass of the parameter's module, and fills memory again before the
// module's backward: without a new version, and maybe at the same address, before the bytes are there. A recipe that
// another module's backward runs would compute from none of the parameter's bytes. Nothing tells such a leaf when it is
// saved. So where leaves may be sharded, a recipe computes from a leaf only once a guard has ended with the leaf's
// memory still in place.
//
// Threads: every member may be called from any thread.
class LeafMemory {
 public:
  // From now on leaves may be sharded. Before, all are taken to keep their memory.
  void may_be_sharded() { may_be_sharded_ = true; }

  // Whether the recipe computes from no leaf, or only from leaves that keep their memory. The others are looked at when
  // the next guard ends.
  [[nodiscard]] bool stays(const GraphRecipe& recipe);

  // Looks at all leaves so far. To be called when a guard ends.
  void look();

 private:
  enum class Found : std::uint8_t { kNothing, kStays, kGoes };
  struct Leaf {
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;
    const void* data;
    std::size_t bytes;
    Found found = Found::kNothing;
  };

  std::atomic<bool> may_be_sharded_{false};
  Mutex mutex_;
  std::unordered_map<const c10::StorageImpl*, Leaf> leaves_ EBB_GUARDED_BY(mutex_);
};

}  // namespace ebb

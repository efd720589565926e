#pragma once

#include <atomic>
#include <optional>
#include <unordered_map>

#include <c10/core/StorageImpl.h>

#include "streams/base/mutex.h"

namespace ebb {

class LogRecipe;

// Which leaves recipes may compute from where leaves may be sharded: only those that were in place at the end of each
// guard so far. FSDP2 frees a parameter's memory after the forward pass of the parameter's module, and fills memory
// again before the module's backward: without a new version, and maybe at the same address, before the bytes are there.
// Managed bytes come back by themselves.
//
// Threads: every member may be called from any thread.
class ShardedLeaves {
 public:
  // From now on the memory of leaves may be taken away between their uses: FSDP, ZeRO.
  void may_be() { may_be_ = true; }

  // nullopt: a later step will tell.
  [[nodiscard]] std::optional<bool> may_compute(const LogRecipe& recipe);

  // Called when a guard ends.
  void guard_ended() noexcept;

 private:
  struct Leaf {
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;
    const void* data;
    std::optional<bool> stays = {};  // whether the memory was there at the end of each guard so far
  };

  std::atomic<bool> may_be_{false};
  Mutex mutex_;
  std::unordered_map<const c10::StorageImpl*, Leaf> leaves_ EBB_GUARDED_BY(mutex_);
};

}  // namespace ebb

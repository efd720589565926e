#pragma once

#include <cstdint>
#include <memory>
#include <vector>

namespace ebb {

class SavedStorage;

// The calling thread's copies out that wait for the operation that saved their storages to be over.
//
// Note [Saved before it is filled]
// An operation may save a tensor first and fill it afterwards: rrelu in training mode does so with its `noise`. A copy
// that starts at the save would take garbage, and no version tells. A tensor that is filled later was made for the
// operation, so it has no grad_fn. A tensor with a grad_fn was computed before, and its copy starts at once. For a
// tensor without a grad_fn the copy is deferred until the operation is over. The operation is over when the thread
// saves for another node (an operation makes its node before its saves, and nodes are numbered), or when a guard ends
// on the thread. Until then the storage stays resident, and a backward that comes first gets the resident bytes.
//
// Ownership: entries do not keep their storages alive. A storage whose saves have ended is never copied.
class DeferredCopies {
 public:
  static DeferredCopies& of_this_thread() { return here_; }

  // Requires that defer_offload has been called on `saved`.
  void add(const std::shared_ptr<SavedStorage>& saved);

  // Starts the copies of operations that are over. A storage whose copy cannot start stays resident.
  void start_finished() noexcept {
    if (!entries_.empty()) {
      start_if_finished();
    }
  }

  // Starts all of the thread's deferred copies. A storage whose copy cannot start stays resident.
  void start_all() noexcept;

 private:
  void start_if_finished() noexcept;

  static thread_local DeferredCopies here_;
  std::vector<std::weak_ptr<SavedStorage>> entries_;
  std::uint64_t next_node_ = 0;  // the number of the node after the one that saved the entries
};

}  // namespace ebb

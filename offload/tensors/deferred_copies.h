#pragma once

#include <cstdint>
#include <memory>
#include <vector>

namespace ebb {

class TieredStorage;

// The calling thread's copies out that wait for the operation that saved their storages to be over.
//
// Note [Saved before it is filled]
// An operation may save a tensor first and fill it afterwards: rrelu in training mode does so with its `noise`. A copy
// that starts at the save would take garbage, and no version tells. Such a tensor was made for the operation, so it has
// no grad_fn; what has one was computed before, and its copy starts at once. Without a grad_fn the copy is put off
// until the operation is over: until the thread saves for another node (an operation makes its node before its saves,
// and nodes are numbered), or until a guard ends on the thread. Until then the storage is held as one that is kept, and
// that is what a backward that comes first gets.
//
// Ownership: entries do not keep their storages alive. A save that is dropped is never copied.
class DeferredCopies {
 public:
  static DeferredCopies& of_this_thread();

  // `saved` must have been told to defer_offload.
  void add(const std::shared_ptr<TieredStorage>& saved);

  // Starts the copies of operations that are over. What cannot start stays where it is.
  void start_finished() noexcept;

  // Starts all.
  void start_all() noexcept;

 private:
  std::vector<std::weak_ptr<TieredStorage>> entries_;
  std::uint64_t next_node_ = 0;  // the number of the node after the one that saved the entries
};

}  // namespace ebb

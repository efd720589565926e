#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <utility>

#include <c10/core/Allocator.h>

#include "test/simulated/simulated_memory.h"

namespace ebb {

// SimulatedMemory as an allocator of CPU tensors: memory is poisoned when it is handed out and when it is freed, so
// ATen's own tensors, too, turn into NaN as soon as nobody holds them. Install it with c10::SetCPUAllocator.
//
// Lifetime: must outlive every tensor made with it; an allocator that was ever installed is best never destroyed.
// Threads: every member may be called from any thread.
class SimulatedDeviceAllocator final : public c10::Allocator {
 public:
  // Memory of the calling thread's current simulated stream.
  [[nodiscard]] c10::DataPtr allocate(std::size_t bytes) override;
  [[nodiscard]] c10::DeleterFnPtr raw_deleter() const override;
  void copy_data(void* to, const void* from, std::size_t bytes) const override;

  // A device of so many bytes. A request that does not fit calls `make_room` with the number of missing bytes, again as
  // long as `make_room` returns true, and then throws c10::OutOfMemoryError.
  struct Limit {
    std::uint64_t bytes = 0;
    std::function<bool(std::uint64_t)> make_room;
  };
  // Not while a request is under way. nullopt: no limit.
  void limit(std::optional<Limit> limit) { limit_ = std::move(limit); }

  // Called before each request, unless empty; may let go of memory. Not set while a request is under way.
  void before_each(std::function<void()> call) { before_each_ = std::move(call); }

  [[nodiscard]] SimulatedMemory::Bytes bytes() const { return memory_.bytes(); }
  void reset_peak() { memory_.reset_peak(); }

 private:
  void find_room(std::size_t bytes);

  SimulatedMemory memory_;
  std::optional<Limit> limit_;
  std::function<void()> before_each_;
};

}  // namespace ebb

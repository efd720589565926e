#pragma once

#include <cstddef>

#include <c10/core/Allocator.h>

#include "streams/simulated_memory.h"

namespace ebb {

// SimulatedMemory as an allocator of CPU tensors: memory is poisoned when it is handed out and when it is freed, so
// ATen's own tensors, too, turn into NaN as soon as nobody holds them. Install it with c10::SetCPUAllocator.
//
// Lifetime: must outlive every tensor made with it; one that was ever installed is best never destroyed.
// Threads: every member may be called from any thread.
class SimulatedDeviceAllocator final : public c10::Allocator {
 public:
  // Memory of the calling thread's current simulated stream.
  [[nodiscard]] c10::DataPtr allocate(std::size_t bytes) override;
  [[nodiscard]] c10::DeleterFnPtr raw_deleter() const override;
  void copy_data(void* to, const void* from, std::size_t bytes) const override;

  [[nodiscard]] SimulatedMemory::Bytes bytes() const { return memory_.bytes(); }
  void reset_peak() { memory_.reset_peak(); }

 private:
  SimulatedMemory memory_;
};

}  // namespace ebb

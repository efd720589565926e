#pragma once

#include <cstddef>
#include <limits>
#include <optional>
#include <vector>

#include <c10/core/Device.h>

#include "streams/base/aligned_memory.h"
#include "streams/base/block_pool.h"

namespace ebb {

// Host memory for copies to and from a GPU, in large slabs on huge pages, page-locked if asked for.
//
// Note [Pinning by registration]
// cudaHostAlloc gets 1.5 GiB/s out of the machine. Mapping memory, asking for huge pages, touching them from several
// threads and then registering the memory gets 17 GiB/s, and copies are as fast (measured on an H200 machine: 4 GiB
// in 2.69 s and in 0.24 s).
//
// Threads: as Backing, one at a time.
class HostSlabs final : public Backing {
 public:
  HostSlabs(c10::Device device, bool pinned) : device_(device), pinned_(pinned) {}
  // Waits for the device first: a copy may still be under way. Slabs that CUDA no longer lets go (at process exit)
  // leak.
  ~HostSlabs() override;
  HostSlabs(const HostSlabs&) = delete;
  HostSlabs& operator=(const HostSlabs&) = delete;

  // nullopt where the system refuses, and unless leaves_a_reserve() in system_memory.h. A forked child does not have
  // the slabs. Slabs never touch, so no lease spans two registrations.
  std::optional<std::uint64_t> grow(std::size_t bytes) override;

 private:
  struct Slab {
    AlignedMemory mapping;
    void* data;
  };

  const c10::Device device_;
  const bool pinned_;
  // The size that CUDA has refused to register: mapping and touching so much again would be in vain.
  std::size_t refused_bytes_ = std::numeric_limits<std::size_t>::max();
  std::vector<Slab> slabs_;
};

}  // namespace ebb

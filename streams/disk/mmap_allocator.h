#pragma once

#include <cstddef>
#include <cstdint>
#include <unordered_map>
#include <vector>

#include <c10/core/Allocator.h>

#include "streams/base/aligned_memory.h"
#include "streams/base/mutex.h"

namespace ebb {

// LibTorch's CPU allocator with one difference: large blocks are mappings of their own, and freed ones go back to the
// system.
//
// Note [Memory that malloc keeps]
// A tensor that has left for the disk relieves the machine only if its pages go back to the system. glibc's malloc
// keeps such pages: its first free of a mapped block raises the size from which blocks are mapped at all, up to 32 MiB,
// and smaller ones lie on a heap whose holes stay resident. So large blocks never reach malloc here.
//
// Mapping each block anew costs a page fault for every 4 KiB: without a cache the training program on two cores made
// nine times the page faults and took over four times the system time. So freed blocks are kept for requests of exactly
// their size, which in training are most of them. The kept bytes are bounded, and the block that was freed first is
// unmapped first. A fixed mmap threshold of malloc's gives as much memory back at the price of all those faults, and a
// malloc_trim once a step comes after the step's peak: malloc_trim left nine tenths of plain autograd's resident
// memory.
//
// Memory: a block is rounded up to whole pages and starts on a page. Its content is unspecified.
// Errors: LibTorch's own, because its allocator serves smaller blocks, and requests that the system refuses to map.
// Lifetime: one object for the process, which is never destroyed, because tensors outlive main.
// Threads: every member may be called from any thread.
// Processes: a forked child's copy works there.
class MmapAllocator final : public c10::Allocator {
 public:
  // The least size of a block that is mapped. With 1 MiB the training program's peak was 25 MB higher, and with
  // 128 KiB it was equal.
  static constexpr std::size_t kLeastBytes = std::size_t{256} << 10;

  // Bounds of the memory that is kept for reuse: so many bytes or this part of the bytes in use, whichever is more, and
  // so many blocks. With half the bytes the training program took three times the page faults.
  static constexpr std::uint64_t kCacheBytes = std::uint64_t{64} << 20;
  static constexpr std::uint64_t kCachePart = 16;
  static constexpr std::size_t kCacheBlocks = 1024;

  static MmapAllocator& instance();

  // Makes the instance LibTorch's CPU allocator for the rest of the process. Does nothing where the program has set an
  // allocator of its own; an allocator that the program sets later replaces this. Returns whether the instance is
  // LibTorch's CPU allocator now. Earlier allocations are freed by the allocator that made them.
  static bool install();

  [[nodiscard]] c10::DataPtr allocate(std::size_t bytes) override;
  [[nodiscard]] c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override;

  // Bytes of mapped blocks.
  struct Bytes {
    std::uint64_t in_use = 0;
    std::uint64_t cached = 0;
  };
  [[nodiscard]] Bytes bytes() const;

 private:
  MmapAllocator();
  static void release(void* data);

  [[nodiscard]] void* map(std::size_t bytes);
  [[nodiscard]] AlignedMemory take_cached(std::size_t bytes);
  [[nodiscard]] AlignedMemory remove_in_use(void* data);
  void cache(AlignedMemory block);
  [[nodiscard]] bool unmap_oldest();

  c10::Allocator& inner_;
  mutable Mutex mutex_;
  std::unordered_map<void*, AlignedMemory> in_use_ EBB_GUARDED_BY(mutex_);  // by address
  std::vector<AlignedMemory> cached_ EBB_GUARDED_BY(mutex_);                // the one that was freed first is the first
  Bytes bytes_ EBB_GUARDED_BY(mutex_);
};

}  // namespace ebb

#include "bench/chunk_check_rate.h"

#include <xxhash.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <vector>

#include "streams/base/aligned_memory.h"
#include "streams/disk/io_job.h"
#include "streams/disk/uring_io.h"

namespace ebb {

double chunk_check_gb_per_s(const DiskLoad& load, std::span<const std::byte> memory) {
  const std::size_t chunks_a_block = (load.block_bytes + IoJob::kChunkBytes - 1) / IoJob::kChunkBytes;
  std::vector<AlignedMemory> buffers(std::min<std::size_t>(load.in_flight * chunks_a_block, UringIo::kDepth));
  for (AlignedMemory& buffer : buffers) {
    buffer = allocate_pages(IoJob::kChunkBytes);
    std::memset(buffer.get(), 0, IoJob::kChunkBytes);  // the system provides its pages now
  }
  const std::size_t chunk_bytes = std::min(load.block_bytes, IoJob::kChunkBytes);
  std::uint64_t sum = 0;
  std::size_t count = 0;
  const auto start = std::chrono::steady_clock::now();
  for (std::size_t at = 0; at < memory.size(); at += chunk_bytes) {
    const std::size_t bytes = std::min(chunk_bytes, memory.size() - at);
    const std::byte* chunk = memory.data() + at;
    if (load.kind == IoKind::kWrite) {
      std::byte* const buffer = buffers[count++ % buffers.size()].get();
      std::memcpy(buffer, chunk, bytes);
      chunk = buffer;
    }
    sum += ::XXH3_64bits(chunk, bytes);
  }
  [[maybe_unused]] const volatile std::uint64_t all_hashed = sum;
  const std::chrono::duration<double, std::nano> ns = std::chrono::steady_clock::now() - start;
  return static_cast<double>(memory.size()) / ns.count();
}

}  // namespace ebb

#include "bench/chunk_check_rate.h"

#include <xxhash.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstring>

#include "streams/aligned_memory.h"
#include "streams/io_job.h"

namespace ebb {

double chunk_check_gb_per_s(IoKind kind, std::span<const std::byte> memory) {
  const AlignedMemory bounce = allocate_pages(IoJob::kChunkBytes);
  std::memset(bounce.get(), 0, IoJob::kChunkBytes);  // the system provides its pages now
  std::uint64_t sum = 0;
  const auto start = std::chrono::steady_clock::now();
  for (std::size_t at = 0; at < memory.size(); at += IoJob::kChunkBytes) {
    const std::size_t bytes = std::min(IoJob::kChunkBytes, memory.size() - at);
    const std::byte* chunk = memory.data() + at;
    if (kind == IoKind::kWrite) {
      std::memcpy(bounce.get(), chunk, bytes);
      chunk = bounce.get();
    }
    sum += ::XXH3_64bits(chunk, bytes);
  }
  [[maybe_unused]] const volatile std::uint64_t all_hashed = sum;
  const std::chrono::duration<double, std::nano> ns = std::chrono::steady_clock::now() - start;
  return static_cast<double>(memory.size()) / ns.count();
}

}  // namespace ebb

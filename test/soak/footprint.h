#pragma once

#include <cstdint>

namespace ebb {

// Bytes that the C library's malloc has handed out and not got back, in all arenas and in mappings of their own.
std::uint64_t heap_bytes();

// Bytes of this process that are in memory. Throws std::runtime_error where /proc does not say.
std::uint64_t resident_bytes();

// Makes RSS follow what is in use as closely as glibc can: all threads allocate from one arena, large allocations
// always get a mapping of their own, and the heap's free top goes back to the system. Call it before threads start.
void keep_heap_compact();

}  // namespace ebb

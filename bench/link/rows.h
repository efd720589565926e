#pragma once

#include <cstdint>
#include <filesystem>
#include <string>

#include <c10/core/Device.h>

#include "bench/common/result_rows.h"

namespace ebb {

// The measurement of a disk.
struct DiskPlan {
  std::filesystem::path folder;  // on the disk
  std::uint64_t file_bytes = 0;  // of each of two or three files; rounded down to a whole number of the largest blocks
  int repetitions = 1;           // the number that count, after a first that does not
  std::string device;            // the name in each row
};

// For a plan that is carried out much later: throws now the exceptions of add_disk_rows that can be known.
void check(const DiskPlan& plan);

// Adds a row for each size of blocks, number of them in flight, direction and method: raw with io_uring (where this
// process may use it), raw with threads, ebb's own tier ("disk_tier"), the tier with threads where the former
// takes io_uring ("disk_tier_threads"), and the copies and hashes of the tier's I/O threads ("checks"), by one thread
// without a disk. A tier's row has its ratio to the raw method with the higher median, in the same repetition. Throws
// std::invalid_argument for too small a file, and what RawDisk and DiskTierRate throw.
//
// Note [Raw and tier alike]
// These conditions were found to matter, and hold for all methods alike:
//  - the raw methods share a file in the folder, and each tier has a file, made, preallocated and switched to direct
//  I/O
//    by the same code;
//  - every file is written from end to end before anything is timed: the first write to preallocated blocks also
//    changes the file system's own notes of them, and a read of blocks that were never written asks no disk;
//  - all methods use the same memory, which is larger than a processor's caches, and is full of random bytes: zeros may
//    be nothing to a disk;
//  - in each repetition all methods have their turn, and another method is first each time;
//  - so many blocks in flight are so many tickets open. A lane of the tier learns of a new block only when an earlier
//    block is done, copies and hashes the bytes of a write before they are in flight, and cuts blocks into chunks of
//    512 KiB, of which the lane has 16 in flight (with threads: 8). So where the raw disk has 8 in flight there is
//    "disk_tier_backlog" too: all blocks are queued at once, as a forward pass does, and the tier alone bounds what is
//    in flight.
// Nothing waits for the disk's own cache, if it has one: spilled bytes need not survive a power cut. A virtual machine
// cannot tell which caches its host has for the disk: a file of a few GiB may be read from these caches.
void add_disk_rows(const DiskPlan& plan, ResultRows& rows);

// Adds a row for each size of copies, kind of host memory, direction, and whether the other direction is busy; then
// rows of ebb's own tier with blocks of 64 MiB, each as a ratio of the link's rate, measured in turn with the link's.
// `repetitions`: the number that count, after a first that does not. Throws what RawLink and PinnedTierRate throw.
void add_link_rows(c10::Device device, int repetitions, ResultRows& rows);

}  // namespace ebb

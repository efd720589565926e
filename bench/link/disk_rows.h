#pragma once

#include <cstdint>
#include <filesystem>
#include <string>

#include "bench/common/result_rows.h"

namespace ebb {

// What is measured of a disk.
struct DiskPlan {
  std::filesystem::path folder;  // on it
  std::uint64_t file_bytes = 0;  // of each of two or three files; rounded down to a whole number of the largest blocks
  int repetitions = 1;           // those that count, after one that does not
  std::string device;            // the name in each row
};

// For a plan that is to be carried out much later: throws now what add_disk_rows would throw, as far as that can be
// known.
void check(const DiskPlan& plan);

// Adds a row for each size of blocks, number of them in flight, direction and method: raw with io_uring (where this
// process may use it), raw with threads, ebb's own tier ("disk_tier"), that with threads where it takes io_uring
// ("disk_tier_threads"), and what its I/O threads copy and hash ("checks"), by one thread without a
// disk. A tier's row has its ratio to that raw method which has the higher median, in the same repetition. Throws
// std::invalid_argument for too small a file, and what RawDisk and DiskTierRate throw.
//
// Note [Raw and tier alike]
// What was found to matter, and is the same for all:
//  - the raw methods share a file in the folder, and each tier has one, made, preallocated and switched to direct I/O
//    by the same code;
//  - every file is written from end to end before anything is timed: the first write to preallocated blocks also
//    changes the file system's own notes of them, and a read of blocks that were never written asks no disk;
//  - all methods use the same memory, which is larger than a processor's caches, and is full of random bytes: zeros may
//    be nothing to a disk;
//  - in each repetition all methods have their turn, and another one is first each time;
//  - so many blocks in flight are so many tickets open. A lane of the tier learns of a new block only when an earlier
//    one is done, copies and hashes what it writes before it is in flight, and cuts blocks into chunks of 512 KiB,
//    of which it has 16 in flight itself (with threads: 8). So where the raw disk has 8 in flight there is
//    "disk_tier_backlog" too: all blocks are queued at once, as a forward pass does, and the tier alone bounds what is
//    in flight.
// Nothing waits for the disk's own cache, if it has one: what is spilled need not survive a power cut. And what caches
// the disk of a virtual machine's host has, nobody can tell from inside: a file of a few GiB may be read from them.
void add_disk_rows(const DiskPlan& plan, ResultRows& rows);

}  // namespace ebb

#pragma once

#include <chrono>
#include <cstddef>
#include <string>
#include <vector>

#include "streams/base/ticket.h"
#include "streams/disk/io_queue.h"

namespace ebb {

inline constexpr std::size_t kMiB = std::size_t{1} << 20;

// Time for a queue that does not wait to go wrong. Nothing depends on it when the queue is right.
inline constexpr std::chrono::milliseconds kLongEnough{50};

// The engines that this machine lets us use: the test case runs once for each. Says so where io_uring is left out.
DiskIo each_engine();

// What the ticket's job failed with; "no error" if it did not.
std::string error_of(const Ticket& ticket);

std::vector<std::byte> random_bytes(std::size_t count, unsigned seed);

}  // namespace ebb

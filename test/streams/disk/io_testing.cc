#include "test/streams/disk/io_testing.h"

#include <exception>
#include <random>

#include <catch2/catch.hpp>

#include "streams/disk/uring_io.h"

namespace ebb {

DiskIo each_engine() {
  std::vector<DiskIo> engines{DiskIo::kThreads};
  if (UringIo::refusal()) {
    WARN("SKIPPED with io_uring: " << UringIo::refusal().message());
  } else {
    engines.push_back(DiskIo::kUring);
  }
  return GENERATE_COPY(from_range(engines));
}

std::string error_of(const Ticket& ticket) {
  try {
    ticket->synchronize();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "no error";
}

std::vector<std::byte> random_bytes(std::size_t count, unsigned seed) {
  std::mt19937_64 random(seed);
  std::vector<std::byte> bytes(count);
  for (std::byte& each : bytes) {
    each = static_cast<std::byte>(random());
  }
  return bytes;
}

}  // namespace ebb

#pragma once

#include <cstdint>
#include <optional>

namespace ebb {

// How Offloader::manage keeps parameters.
struct Parameters {
  // The most bytes of managed storages that are on the device at once, with what is being prefetched and what is being
  // copied home. An operation whose own storages take more gets them all the same.
  std::uint64_t device_bytes = 0;

  // How far ahead of its use a storage is fetched, in bytes of storages; nullopt: half of `device_bytes`.
  std::optional<std::uint64_t> prefetch_bytes;
};

}  // namespace ebb

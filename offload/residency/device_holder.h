#pragma once

#include <cstdint>
#include <functional>

namespace ebb {

// Something that holds device memory, besides saved storages, and can let go of it when the device is full.
//
// Threads: every member may be called from any thread.
class DeviceHolder {
 public:
  virtual ~DeviceHolder() = default;

  // How many bytes of device memory are held.
  [[nodiscard]] virtual std::uint64_t held_bytes() const = 0;

  // How many bytes of the tier are the holder's.
  [[nodiscard]] virtual std::uint64_t home_bytes() = 0;

  // Lets go of memory until `enough` returns true or no more can go. Waits for no lock under which device memory is
  // asked for or the interpreter's lock is taken, because the caller may hold the device allocator's lock.
  virtual void let_go(const std::function<bool()>& enough) = 0;
};

}  // namespace ebb

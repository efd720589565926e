#pragma once

#include <cstddef>
#include <cstdint>

#include <c10/core/Allocator.h>
#include <c10/core/Storage.h>

#include "offload/report/device_account.h"

namespace ebb {

// Makes `memory` a storage for tensors that the program gets. `on_device` counts the bytes until nobody uses the
// storage.
//
// Note [The allocator's own memory]
// LibTorch knows its memory by the deleter: CUDACachingAllocator::recordStream silently ignores a DataPtr with any
// other deleter, and the program's side stream then reads memory that has been given to somebody else. So the DataPtr
// is handed on as the allocator made it, and the lease that counts the bytes is a member of the storage. The storage
// can be resized, as a storage that LibTorch makes.
[[nodiscard]] c10::Storage counted_storage(c10::DataPtr memory, std::size_t bytes, DeviceAccount::Held on_device);

}  // namespace ebb

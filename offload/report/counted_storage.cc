#include "offload/report/counted_storage.h"

#include <optional>
#include <utility>

#include <c10/core/StorageImpl.h>

namespace ebb {
namespace {

class CountedStorageImpl final : public c10::StorageImpl {
 public:
  CountedStorageImpl(c10::DataPtr memory, std::size_t bytes, c10::Allocator* allocator, DeviceAccount::Held on_device)
      : StorageImpl(use_byte_size_t(), bytes, std::move(memory), allocator, /*resizable=*/true),
        on_device_(std::move(on_device)) {}

  // Called when the last tensor lets go, though weak references may live on.
  void release_resources() override {
    StorageImpl::release_resources();
    on_device_.reset();
  }

 private:
  std::optional<DeviceAccount::Held> on_device_;
};

}  // namespace

c10::Storage counted_storage(c10::DataPtr memory, std::size_t bytes, DeviceAccount::Held on_device) {
  c10::Allocator* const allocator = c10::GetAllocator(memory.device().type());
  return c10::Storage(
      c10::make_intrusive<CountedStorageImpl>(std::move(memory), bytes, allocator, std::move(on_device)));
}

}  // namespace ebb

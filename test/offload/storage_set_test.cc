#include "offload/storage_set.h"

#include <cstddef>
#include <vector>

#include <c10/core/CPUAllocator.h>
#include <catch2/catch.hpp>

namespace ebb {
namespace {

c10::Storage new_storage() { return {c10::Storage::use_byte_size_t(), 1, c10::GetCPUAllocator(), false}; }

std::vector<c10::Storage> new_storages(std::size_t count) {
  std::vector<c10::Storage> storages;
  for (std::size_t i = 0; i < count; ++i) {
    storages.push_back(new_storage());
  }
  return storages;
}

std::size_t members(const StorageSet& set, const std::vector<c10::Storage>& storages) {
  std::size_t count = 0;
  for (const c10::Storage& storage : storages) {
    count += set.contains(storage) ? 1 : 0;
  }
  return count;
}

constexpr std::size_t kMany = 20'000;  // several for each entry of the set's table

TEST_CASE("a storage set has what was inserted, and nothing else") {
  StorageSet set;
  const std::vector<c10::Storage> inserted = new_storages(kMany);
  const std::vector<c10::Storage> others = new_storages(kMany);
  CHECK(members(set, inserted) == 0);
  for (const c10::Storage& storage : inserted) {
    set.insert(storage);
    set.insert(storage);
  }
  CHECK(members(set, inserted) == kMany);
  CHECK(members(set, others) == 0);
}

TEST_CASE("a storage set takes no later storage for one that it has forgotten") {
  StorageSet set;
  for (int i = 0; i < 10; ++i) {  // the allocator hands out the same addresses again
    const std::vector<c10::Storage> storages = new_storages(kMany);
    REQUIRE(members(set, storages) == 0);
    for (const c10::Storage& storage : storages) {
      set.insert(storage);
    }
    REQUIRE(members(set, storages) == kMany);
  }
}

}  // namespace
}  // namespace ebb

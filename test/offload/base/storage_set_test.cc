#include "offload/base/storage_set.h"

#include <atomic>
#include <cstddef>
#include <set>
#include <thread>
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
  std::set<const void*> before;
  int used_again = 0;
  for (int i = 0; i < 10; ++i) {
    const std::vector<c10::Storage> storages = new_storages(kMany);
    REQUIRE(members(set, storages) == 0);
    for (const c10::Storage& storage : storages) {
      set.insert(storage);
      used_again += before.insert(storage.unsafeGetStorageImpl()).second ? 0 : 1;
    }
    REQUIRE(members(set, storages) == kMany);
  }
#ifndef __SANITIZE_ADDRESS__  // which hands out no address again for long
  CHECK(used_again > 0);
#endif
}

TEST_CASE("a thread that asks while others have the set cleaned gets the same answers all the time") {
  StorageSet set;
  const std::vector<c10::Storage> stay = new_storages(16);
  for (const c10::Storage& storage : stay) {
    set.insert(storage);
  }
  std::atomic<int> inserting{2};
  const auto come_and_go = [&] {
    for (int i = 0; i < 200; ++i) {  // the set is cleaned whenever it has doubled
      for (const c10::Storage& storage : new_storages(1000)) {
        set.insert(storage);
      }
    }
    --inserting;
  };
  std::vector<std::thread> threads;
  for (int i = inserting; i > 0; --i) {
    threads.emplace_back(come_and_go);
  }
  std::size_t asked = 0;
  int wrong = 0;
  do {  // about one for long: it is answered without the lock, which a cleaning holds, unless it shares its entry
    constexpr std::size_t kLong = 10'000;
    wrong += set.contains(stay[asked++ / kLong % stay.size()]) ? 0 : 1;
  } while (inserting > 0);
  for (std::thread& thread : threads) {
    thread.join();
  }
  CHECK(wrong == 0);
}

}  // namespace
}  // namespace ebb

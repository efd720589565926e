#include "bench/huge_pages.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <future>
#include <new>
#include <vector>

namespace ebb {
namespace {

constexpr std::size_t kHugePage = std::size_t{2} << 20;
constexpr std::size_t kPage = 4096;

void* map(std::size_t bytes) {
  void* const mapping =
      mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapping == MAP_FAILED) {
    throw std::bad_alloc();
  }
  return mapping;
}

std::byte* align(void* mapping) {
  const auto address = reinterpret_cast<std::uintptr_t>(mapping);
  return static_cast<std::byte*>(mapping) + ((address + kHugePage - 1) / kHugePage * kHugePage - address);
}

}  // namespace

HugePages::HugePages(std::size_t bytes) : bytes_(bytes), mapping_(map(bytes + kHugePage)), data_(align(mapping_)) {
  static_cast<void>(madvise(data_, bytes_, MADV_HUGEPAGE));
}

HugePages::~HugePages() { munmap(mapping_, bytes_ + kHugePage); }

void HugePages::touch(std::size_t threads) {
  // Whole huge pages: two threads at one would wait for one another.
  const std::size_t share = (bytes_ / threads + kHugePage - 1) / kHugePage * kHugePage;
  const auto touch_share = [&](std::size_t begin) {
    for (std::size_t at = begin; at < std::min(bytes_, begin + share); at += kPage) {
      data_[at] = std::byte{0};
    }
  };
  std::vector<std::future<void>> others;
  for (std::size_t begin = share; begin < bytes_; begin += share) {
    others.push_back(std::async(std::launch::async, touch_share, begin));
  }
  touch_share(0);
  for (std::future<void>& other : others) {
    other.get();
  }
}

}  // namespace ebb

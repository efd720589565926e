#include "streams/disk/mmap_allocator.h"

#include <pthread.h>

#include <algorithm>
#include <iterator>
#include <limits>
#include <utility>

#include <c10/core/CPUAllocator.h>

// LibTorch's flags, by which its own CPU allocator fills what it hands out (c10/core/impl/alloc_cpu.cpp).
C10_DECLARE_bool(caffe2_cpu_allocator_do_zero_fill);
C10_DECLARE_bool(caffe2_cpu_allocator_do_junk_fill);

namespace ebb {
namespace {

constexpr std::size_t kMostBytes = std::numeric_limits<std::ptrdiff_t>::max();  // more cannot be rounded up, nor mapped

bool is_to_be_filled() { return FLAGS_caffe2_cpu_allocator_do_zero_fill || FLAGS_caffe2_cpu_allocator_do_junk_fill; }

std::size_t bytes_of(const AlignedMemory& block) { return block.get_deleter().mapped_bytes; }

}  // namespace

MmapAllocator::MmapAllocator() : inner_(*c10::GetDefaultCPUAllocator()) {
  cached_.reserve(kCacheBlocks);  // so that freeing a block cannot fail
  // A fork while another thread holds the lock would leave the child's lock locked for ever. malloc guards its own
  // locks in the same way.
  constexpr auto lock = []() EBB_ACQUIRE(instance().mutex_) { instance().mutex_.lock(); };
  constexpr auto unlock = []() EBB_RELEASE(instance().mutex_) { instance().mutex_.unlock(); };
  static_cast<void>(::pthread_atfork(lock, unlock, unlock));
}

MmapAllocator& MmapAllocator::instance() {
  static auto* const allocator = new MmapAllocator;
  return *allocator;
}

bool MmapAllocator::install() {
  if (c10::GetCPUAllocator() == c10::GetDefaultCPUAllocator()) {
    c10::SetCPUAllocator(&instance());  // with the lowest priority: the program may install an allocator later
  }
  return c10::GetCPUAllocator() == &instance();
}

c10::DataPtr MmapAllocator::allocate(std::size_t bytes) {
  void* data =
      bytes >= kLeastBytes && bytes <= kMostBytes && !is_to_be_filled() ? map(round_up_to_page(bytes)) : nullptr;
  if (data != nullptr) {
    c10::profiledCPUMemoryReporter().New(data, bytes);
  } else {
    data = inner_.raw_allocate(bytes);
  }
  return {data, data, &release, c10::Device(c10::kCPU)};
}

void MmapAllocator::copy_data(void* to, const void* from, std::size_t bytes) const {
  default_copy_data(to, from, bytes);
}

// Most blocks of the inner allocator do not start on a page, and are recognized without the lock.
void MmapAllocator::release(void* data) {
  MmapAllocator& allocator = instance();
  AlignedMemory block = is_aligned(data, kPageBytes) ? allocator.remove_in_use(data) : nullptr;
  if (block == nullptr) {
    allocator.inner_.raw_deallocate(data);
    return;
  }
  c10::profiledCPUMemoryReporter().Delete(data);  // before the address can be used again
  allocator.cache(std::move(block));
}

// Null where the system maps no more, even after all cached blocks are unmapped.
void* MmapAllocator::map(std::size_t bytes) {
  AlignedMemory block = take_cached(bytes);
  if (block == nullptr) {
    block = map_pages(bytes);
  }
  if (block == nullptr) {
    while (unmap_oldest()) {
    }
    block = map_pages(bytes);
  }
  if (block == nullptr) {
    return nullptr;
  }
  void* const data = block.get();
  const MutexLock lock(mutex_);
  in_use_.emplace(data, std::move(block));
  bytes_.in_use += bytes;
  return data;
}

// The block of this size that was freed last: its pages are the likeliest to be in the processor's caches.
AlignedMemory MmapAllocator::take_cached(std::size_t bytes) {
  const MutexLock lock(mutex_);
  const auto found =
      std::find_if(cached_.rbegin(), cached_.rend(), [&](const auto& b) { return bytes_of(b) == bytes; });
  if (found == cached_.rend()) {
    return nullptr;
  }
  AlignedMemory block = std::move(*found);
  cached_.erase(std::next(found).base());
  bytes_.cached -= bytes;
  return block;
}

AlignedMemory MmapAllocator::remove_in_use(void* data) {
  const MutexLock lock(mutex_);
  auto found = in_use_.extract(data);
  if (found.empty()) {
    return nullptr;
  }
  bytes_.in_use -= bytes_of(found.mapped());
  return std::move(found.mapped());
}

// Makes room for the block by unmapping what was freed before it, and unmaps the block itself where it is too large.
void MmapAllocator::cache(AlignedMemory block) {
  do {
    const MutexLock lock(mutex_);
    const std::uint64_t cached = bytes_.cached + bytes_of(block);
    if (cached_.size() < kCacheBlocks && cached <= std::max(kCacheBytes, bytes_.in_use / kCachePart)) {
      cached_.push_back(std::move(block));
      bytes_.cached = cached;
      return;
    }
  } while (unmap_oldest());
}

// Unmaps the block that was freed first, if there is one. Outside of the lock: for a large block the kernel takes
// milliseconds.
bool MmapAllocator::unmap_oldest() {
  AlignedMemory oldest;
  const MutexLock lock(mutex_);
  if (!cached_.empty()) {
    oldest = std::move(cached_.front());
    cached_.erase(cached_.begin());
    bytes_.cached -= bytes_of(oldest);
  }
  return oldest != nullptr;
}

MmapAllocator::Bytes MmapAllocator::bytes() const {
  const MutexLock lock(mutex_);
  return bytes_;
}

}  // namespace ebb

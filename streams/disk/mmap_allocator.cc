#include "streams/disk/mmap_allocator.h"

#include <pthread.h>
#include <sys/mman.h>

#include <algorithm>
#include <iterator>
#include <limits>

#include <c10/core/CPUAllocator.h>

#include "streams/base/aligned_memory.h"

// LibTorch's flags, by which its own CPU allocator fills what it hands out (c10/core/impl/alloc_cpu.cpp).
C10_DECLARE_bool(caffe2_cpu_allocator_do_zero_fill);
C10_DECLARE_bool(caffe2_cpu_allocator_do_junk_fill);

namespace ebb {
namespace {

constexpr std::size_t kMostBytes = std::numeric_limits<std::ptrdiff_t>::max();  // more cannot be rounded up, nor mapped

bool is_to_be_filled() { return FLAGS_caffe2_cpu_allocator_do_zero_fill || FLAGS_caffe2_cpu_allocator_do_junk_fill; }

// Unmaps. The system refuses where unmapping would split a mapping and the process has as many mappings as it may have;
// the pages then go back all the same, and their addresses are lost.
void unmap_pages(void* data, std::size_t bytes) {
  if (::munmap(data, bytes) != 0) {
    static_cast<void>(::madvise(data, bytes, MADV_DONTNEED));
  }
}

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
  const auto block = is_aligned(data, kPageBytes) ? allocator.remove_in_use(data) : std::nullopt;
  if (!block) {
    allocator.inner_.raw_deallocate(data);
    return;
  }
  c10::profiledCPUMemoryReporter().Delete(data);  // before the address can be used again
  allocator.cache(*block);
}

// Null where the system maps no more, even after all cached blocks are unmapped.
void* MmapAllocator::map(std::size_t bytes) {
  void* data = take_cached(bytes);
  if (data == nullptr) {
    data = map_pages(bytes).release();
  }
  if (data == nullptr) {
    while (unmap_oldest()) {
    }
    data = map_pages(bytes).release();
  }
  if (data == nullptr) {
    return nullptr;
  }
  const MutexLock lock(mutex_);
  try {
    in_use_.emplace(data, bytes);
  } catch (...) {
    unmap_pages(data, bytes);
    throw;
  }
  bytes_.in_use += bytes;
  return data;
}

// The block of this size that was freed last: its pages are the likeliest to be in the processor's caches.
void* MmapAllocator::take_cached(std::size_t bytes) {
  const MutexLock lock(mutex_);
  const auto found = std::find_if(cached_.rbegin(), cached_.rend(), [&](const Block& b) { return b.bytes == bytes; });
  if (found == cached_.rend()) {
    return nullptr;
  }
  void* const data = found->data;
  cached_.erase(std::next(found).base());
  bytes_.cached -= bytes;
  return data;
}

std::optional<MmapAllocator::Block> MmapAllocator::remove_in_use(void* data) {
  const MutexLock lock(mutex_);
  const auto found = in_use_.find(data);
  if (found == in_use_.end()) {
    return std::nullopt;
  }
  const Block block{data, found->second};
  in_use_.erase(found);
  bytes_.in_use -= block.bytes;
  return block;
}

// Makes room for the block by unmapping what was freed before it, and unmaps the block itself where it is too large.
void MmapAllocator::cache(Block block) {
  const auto fits = [this, &block]() EBB_REQUIRES(mutex_) {
    return cached_.size() < kCacheBlocks &&
           bytes_.cached + block.bytes <= std::max(kCacheBytes, bytes_.in_use / kCachePart);
  };
  while (true) {
    {
      const MutexLock lock(mutex_);
      if (fits()) {
        cached_.push_back(block);
        bytes_.cached += block.bytes;
        return;
      }
    }
    if (!unmap_oldest()) {
      unmap_pages(block.data, block.bytes);
      return;
    }
  }
}

// Unmaps the block that was freed first, if there is one. Outside of the lock: for a large block the kernel takes
// milliseconds.
bool MmapAllocator::unmap_oldest() {
  Block oldest;
  {
    const MutexLock lock(mutex_);
    if (cached_.empty()) {
      return false;
    }
    oldest = cached_.front();
    cached_.erase(cached_.begin());
    bytes_.cached -= oldest.bytes;
  }
  unmap_pages(oldest.data, oldest.bytes);
  return true;
}

MmapAllocator::Bytes MmapAllocator::bytes() const {
  const MutexLock lock(mutex_);
  return bytes_;
}

}  // namespace ebb

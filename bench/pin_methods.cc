#include "bench/pin_methods.h"

#include <chrono>
#include <cstdlib>
#include <future>
#include <memory>
#include <new>
#include <stdexcept>
#include <utility>

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <cuda_runtime_api.h>

#include "bench/bytes.h"
#include "bench/huge_pages.h"
#include "streams/gpu/host_slabs.h"

namespace ebb {
namespace {

constexpr std::size_t kPage = 4096;
constexpr std::size_t kTouchersAhead = 16;
constexpr double kGiB = 0x1p30;

template <typename Call>
double time_s(const Call& call) {
  const auto start = std::chrono::steady_clock::now();
  call();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// Memory that CUDA has page-locked, until the end of this.
class Registration {
 public:
  Registration(c10::Device device, std::byte* data, std::size_t bytes) : device_(device), data_(data) {
    const c10::cuda::CUDAGuard guard(device_);
    C10_CUDA_CHECK(cudaHostRegister(data_, bytes, cudaHostRegisterPortable));
  }
  ~Registration() {
    try {
      const c10::cuda::CUDAGuard guard(device_);
      static_cast<void>(cudaHostUnregister(data_));
    } catch (...) {  // the guard's: CUDA is gone
    }
  }
  Registration(const Registration&) = delete;
  Registration& operator=(const Registration&) = delete;

 private:
  const c10::Device device_;
  std::byte* const data_;
};

// `owner`, whose memory starts at `data`, goes after its registration.
template <typename Owner>
PinnedSlab register_slab(c10::Device device, Owner owner, std::byte* data, std::size_t bytes) {
  struct Registered {
    Registered(Owner owner, c10::Device device, std::byte* data, std::size_t bytes)
        : owner(std::move(owner)), registration(device, data, bytes) {}
    const Owner owner;
    const Registration registration;
  };
  PinnedSlab slab;
  slab.bytes = bytes;
  slab.register_s = time_s([&] {
    const auto registered = std::make_shared<Registered>(std::move(owner), device, data, bytes);
    slab.memory = std::shared_ptr<std::byte>(registered, data);
  });
  return slab;
}

PinnedSlab host_alloc(c10::Device device, std::size_t bytes) {
  const c10::cuda::CUDAGuard guard(device);
  PinnedSlab slab;
  slab.bytes = bytes;
  slab.total_s = time_s([&] {
    void* data = nullptr;
    C10_CUDA_CHECK(cudaHostAlloc(&data, bytes, cudaHostAllocPortable));
    slab.memory = std::shared_ptr<std::byte>(static_cast<std::byte*>(data),
                                             [](std::byte* memory) { static_cast<void>(cudaFreeHost(memory)); });
  });
  return slab;
}

// Aligned to a page, so that no two slabs share one that would be registered twice.
PinnedSlab malloc_and_register(c10::Device device, std::size_t bytes) {
  PinnedSlab slab;
  const double total_s = time_s([&] {
    auto* const data = static_cast<std::byte*>(std::aligned_alloc(kPage, bytes));
    if (data == nullptr) {
      throw std::bad_alloc();
    }
    std::unique_ptr<std::byte, decltype(&std::free)> owner(data, &std::free);
    slab = register_slab(device, std::move(owner), data, bytes);
  });
  slab.total_s = total_s;
  return slab;
}

// `touchers`: threads that touch it first; 0: none do, and registering brings the pages.
PinnedSlab map_and_register(c10::Device device, std::size_t bytes, std::size_t touchers) {
  PinnedSlab slab;
  const double total_s = time_s([&] {
    auto pages = std::make_unique<HugePages>(bytes);
    const double touch_s = touchers == 0 ? 0 : time_s([&] { pages->touch(touchers); });
    std::byte* const data = pages->data();
    slab = register_slab(device, std::move(pages), data, bytes);
    slab.touch_s = touch_s;
  });
  slab.total_s = total_s;
  return slab;
}

PinnedSlab grow_host_slabs(c10::Device device, std::size_t bytes) {
  PinnedSlab slab;
  slab.bytes = bytes;
  slab.total_s = time_s([&] {
    auto slabs = std::make_shared<HostSlabs>(device, /*pinned=*/true);
    const auto range = slabs->grow(bytes);
    if (!range) {
      throw std::runtime_error("the system has no " + format_bytes(bytes) + " more of pinned host memory");
    }
    slab.memory = std::shared_ptr<std::byte>(std::move(slabs), reinterpret_cast<std::byte*>(range->address));
  });
  return slab;
}

}  // namespace

std::vector<PinMethod> pin_methods(c10::Device device) {
  const auto mapped = [device](std::size_t touchers) {
    return [device, touchers](std::size_t bytes) { return map_and_register(device, bytes, touchers); };
  };
  return {
      {"cudaHostAlloc", [device](std::size_t bytes) { return host_alloc(device, bytes); }},
      {"malloc_register", [device](std::size_t bytes) { return malloc_and_register(device, bytes); }},
      {"mmap_register", mapped(0)},
      {"mmap_touch_1_register", mapped(1)},
      {"mmap_touch_4_register", mapped(4)},
      {"mmap_touch_16_register", mapped(16)},
      {"host_slabs", [device](std::size_t bytes) { return grow_host_slabs(device, bytes); }},
  };
}

double register_gib_per_s(c10::Device device, std::size_t slabs, std::size_t slab_bytes, bool at_once) {
  std::vector<std::unique_ptr<HugePages>> pages;
  for (std::size_t i = 0; i < slabs; ++i) {
    pages.push_back(std::make_unique<HugePages>(slab_bytes));
    pages.back()->touch(kTouchersAhead);
  }
  const std::size_t threads = at_once ? slabs : 1;
  std::vector<std::vector<std::unique_ptr<Registration>>> registered(threads);
  std::vector<std::future<void>> futures;
  std::promise<void> go;  // ends before the futures, so that an exception here leaves no thread waiting
  const std::shared_future<void> gone = go.get_future().share();
  const auto work = [&, gone](std::size_t thread) {
    const c10::cuda::CUDAGuard guard(device);  // a thread's first call of CUDA's takes longer
    gone.get();
    for (std::size_t i = thread; i < slabs; i += threads) {
      registered[thread].push_back(std::make_unique<Registration>(device, pages[i]->data(), slab_bytes));
    }
  };
  for (std::size_t thread = 0; thread < threads; ++thread) {
    futures.push_back(std::async(std::launch::async, work, thread));
  }
  const double seconds = time_s([&] {
    go.set_value();
    for (std::future<void>& future : futures) {
      future.get();
    }
  });
  return static_cast<double>(slabs * slab_bytes) / kGiB / seconds;
}

}  // namespace ebb

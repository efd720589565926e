#pragma once

#include <atomic>
#include <cstdint>

#include <c10/core/Allocator.h>

namespace ebb {

// The CPU allocator that was installed before this, plus a count of the bytes in use: LibTorch keeps none for the CPU.
//
// Threads: every member may be called from any thread. The peak is exact for one thread and may miss an instant where
// several allocate and free at once.
class CountingAllocator : public c10::Allocator {
 public:
  // Puts the instance in the place of LibTorch's CPU allocator, once in a process and for good: memory that the
  // instance gave out comes back to it however late. To be called before the threads that allocate start.
  static CountingAllocator& install();

  c10::DataPtr allocate(std::size_t bytes) override;
  [[nodiscard]] c10::DeleterFnPtr raw_deleter() const override;
  void copy_data(void* to, const void* from, std::size_t bytes) const override;

  [[nodiscard]] std::uint64_t now_bytes() const { return now_; }
  [[nodiscard]] std::uint64_t peak_bytes() const { return peak_; }
  void reset_peak() { peak_ = now_.load(); }

 private:
  explicit CountingAllocator(c10::Allocator& inner) : inner_(inner) {}
  static void release(void* data);

  c10::Allocator& inner_;
  std::atomic<std::uint64_t> now_{0};
  std::atomic<std::uint64_t> peak_{0};
};

}  // namespace ebb

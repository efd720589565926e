#pragma once

#include <cstddef>

namespace ebb {

// Memory of the process's own, on huge pages where the system has them, which it gives when the memory is touched.
//
// Threads: one at a time.
class HugePages {
 public:
  // Throws std::bad_alloc.
  explicit HugePages(std::size_t bytes);
  ~HugePages();
  HugePages(const HugePages&) = delete;
  HugePages& operator=(const HugePages&) = delete;

  [[nodiscard]] std::byte* data() const { return data_; }
  [[nodiscard]] std::size_t size() const { return bytes_; }

  // Writes to every page, each of so many threads (at least 1) to an equal share. Throws std::system_error where the
  // system has no more threads.
  void touch(std::size_t threads);

 private:
  const std::size_t bytes_;
  void* const mapping_;
  std::byte* const data_;  // the first huge page that starts in the mapping
};

}  // namespace ebb

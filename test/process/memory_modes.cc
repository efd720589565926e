// What an offloader over the CPU makes of freed memory, which is decided once in a process.

#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/Functions.h>
#include <c10/core/CPUAllocator.h>

#include "offload/offloader.h"
#include "test/process/modes.h"
#include "test/process/world.h"

namespace ebb {
namespace {

constexpr std::int64_t kFloats = std::int64_t{1} << 20;  // 4 MiB
constexpr int kTensors = 64;

std::uint64_t resident_bytes() {
  std::uint64_t mapped_pages = 0;
  std::uint64_t resident_pages = 0;
  std::ifstream("/proc/self/statm") >> mapped_pages >> resident_pages;
  return resident_pages * static_cast<std::uint64_t>(sysconf(_SC_PAGESIZE));
}

Options over_cpu(bool return_freed_memory) {
  Options options;
  options.device = at::kCPU;
  options.return_freed_memory = return_freed_memory;
  return options;
}

// Tensors beside small ones that stay, as a model's do. Says whether most of their memory went back to the system.
void say_what_freeing_does() {
  at::empty({6 * kFloats}).fill_(1);  // freed at once: from here on malloc maps nothing smaller
  std::vector<at::Tensor> large;
  std::vector<at::Tensor> small;
  for (int i = 0; i < kTensors; ++i) {
    large.push_back(at::ones({kFloats}));
    small.push_back(at::ones({16}));
  }
  const std::uint64_t most = resident_bytes();
  large.clear();
  const bool returned = resident_bytes() + kTensors / 2 * kFloats * sizeof(float) <= most;
  say(returned ? "returned" : "kept");
}

void memory_returned() {
  const at::Tensor before = at::ones({kFloats});
  std::optional<Offloader> offloader(over_cpu(true));
  say_what_freeing_does();
  const at::Tensor during = at::ones({kFloats});
  offloader.reset();
  say_what_freeing_does();
  say(before.equal(during) ? "equal" : "different");
}

void memory_left_to_malloc() {
  const Offloader offloader(over_cpu(false));
  say(c10::GetCPUAllocator() == c10::GetDefaultCPUAllocator() ? "LibTorch's allocator" : "another allocator");
  say_what_freeing_does();
}

class ProgramsAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(std::size_t bytes) override { return c10::GetDefaultCPUAllocator()->allocate(bytes); }
  [[nodiscard]] c10::DeleterFnPtr raw_deleter() const override { return c10::GetDefaultCPUAllocator()->raw_deleter(); }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { default_copy_data(to, from, bytes); }
};

void memory_of_programs_allocator() {
  ProgramsAllocator before;
  ProgramsAllocator after;
  c10::SetCPUAllocator(&before);
  {
    const Offloader offloader(over_cpu(true));
    say(c10::GetCPUAllocator() == &before ? "the program's" : "another");
  }
  c10::SetCPUAllocator(c10::GetDefaultCPUAllocator());
  const Offloader offloader(over_cpu(true));
  say(c10::GetCPUAllocator() == c10::GetDefaultCPUAllocator() ? "LibTorch's" : "another");
  c10::SetCPUAllocator(&after);
  say(c10::GetCPUAllocator() == &after ? "the program's" : "another");
}

}  // namespace

const Modes kMemoryModes{
    {"memory_returned", memory_returned},
    {"memory_left_to_malloc", memory_left_to_malloc},
    {"memory_of_programs_allocator", memory_of_programs_allocator},
};

}  // namespace ebb

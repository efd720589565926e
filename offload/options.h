#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>

#include <c10/core/Device.h>

#include "offload/device_meter.h"
#include "policy/budget.h"
#include "policy/minimum_size.h"
#include "policy/policy.h"

namespace ebb {

enum class HostMemory : std::uint8_t {
  kPinned,    // page-locked: copies run at the link's rate, beside compute
  kPageable,  // ordinary memory: a third of the rate, and the driver may block the host during a copy
};

enum class Copies : std::uint8_t {
  kOverlapped,       // on two side streams, one for each direction
  kOnComputeStream,  // in the compute stream's own order: simple, and as slow as the copies are
};

enum class DiskIo : std::uint8_t {
  kAuto,     // io_uring where the kernel permits it, else threads
  kUring,    // io_uring, or an error
  kThreads,  // a few threads that call pread and pwrite
};

// How an Offloader works. All sizes are bytes. nullopt is "ebb chooses".
struct Options {
  // false: every guard of this offloader does nothing, and autograd saves as if ebb were not there.
  bool enabled = true;

  // The device to relieve. nullopt: the current CUDA device if there is one, else the CPU.
  std::optional<c10::Device> device = std::nullopt;

  // What leaves the device. nullptr: minimum_size(1 MiB) (policy/minimum_size.h has the measurement behind it).
  std::shared_ptr<Policy> policy = nullptr;

  // Have a plan decide, instead of `policy`, what stays on the device, what is moved and what is recomputed: one that
  // is made from the first steps, in which everything is moved or recomputed (docs/planning.md). Stash and window are
  // then the plan's affair too. DeviceBytes{n}, ShareOfFree{0.9} (GPU only), Slowdown{0.02} or LeastMemory{}. A budget
  // that is too small is an error in the step after those, which names the least that can be reached.
  std::optional<DeviceBudget> device_budget = std::nullopt;

  // Smaller storages stay where they are, and are other memory to the plan.
  std::uint64_t planned_minimum_bytes = kDefaultMinimumBytes;

  // A warning instead of that error, and as little memory as can be.
  bool device_budget_is_a_wish = false;

  // What a budget is compared with, asked in the steps from which a plan is made and in one that checks it. Empty: on a
  // GPU LibTorch's allocator, whose peak (resetPeakStats) is set back each time; on the CPU, where LibTorch does not
  // count, a budget is for saved storages alone.
  DeviceMeter device_meter = {};

  // GPU only: when the device has no memory left, copy storages out that the policy has kept, those first that were
  // saved first, until there is room again (Note [Out of memory] in out_of_memory.h). Without need nothing moves.
  bool evict_when_out_of_memory = true;

  // Device memory held only because copies out of it are not done. Over it, the compute stream waits for the oldest.
  // nullopt: a twelfth of the bytes that the last step offloaded, at most 2 GiB, but room for two of the largest.
  // What it has when backward begins is kept for its use there: in the window or, while steps wait for copies and
  // window_bytes is not set, beside it.
  std::optional<std::uint64_t> stash_bytes = std::nullopt;

  // Device memory prefetched of its use in backward. nullopt: as for the stash; twice that share, and from the
  // moment backward begins, while steps wait for copies. A storage larger than a window that was set here is an error
  // that names both sizes, at the storage's first save.
  std::optional<std::uint64_t> window_bytes = std::nullopt;

  // GPU only: where the bytes go, and how.
  HostMemory host_memory = HostMemory::kPinned;
  Copies copies = Copies::kOverlapped;

  // The most host memory (GPU) or spill file (CPU) to use. Storages that find no room stay on the device, counted.
  // nullopt: whatever the system gives.
  std::optional<std::uint64_t> capacity_bytes = std::nullopt;

  // Warn once when more than this fraction of the machine's memory is in use. In (0, 1].
  double host_memory_warning = 0.6;

  // CPU only: where the spill file is made (it is never visible there), and what reads and writes it. The folder must
  // belong to this user or to root, and nobody else may write to it unless it is sticky, as /var/tmp is.
  std::filesystem::path spill_folder = "/var/tmp";
  DiskIo disk_io = DiskIo::kAuto;

  // CPU only: freed blocks of 256 KiB and more go back to the system instead of staying with malloc, so that the
  // process's resident memory falls when saves leave (Note [Memory that malloc keeps] in
  // streams/disk/mmap_allocator.h). The first such offloader replaces LibTorch's CPU allocator for that, for all
  // tensors and the rest of the process; an allocator that the program has set by then stays. false: LibTorch's CPU
  // allocator stays.
  bool return_freed_memory = true;

  // Record a sample whenever the saved bytes on the device change (Offloader::take_timeline).
  bool record_timeline = false;

  // Record every copy and stall, and every pack and unpack of what is not passed through (Offloader::take_trace). Costs
  // one more event a copy. Over a tier of the caller's: packs and unpacks only.
  bool record_trace = false;
};

// Throws std::invalid_argument with one sentence that names the option, its value and what would be accepted.
// Warns, and does not throw, for a spill folder on tmpfs.
void validate(const Options& options);

}  // namespace ebb

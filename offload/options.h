#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>

#include <c10/core/Device.h>

#include "offload/device_meter.h"
#include "policy/budget.h"
#include "policy/policies.h"
#include "policy/policy.h"
#include "streams/base/disk_io.h"

namespace ebb {

enum class HostMemory : std::uint8_t {
  kPinned,    // page-locked: copies run at the link's rate, beside compute
  kPageable,  // ordinary memory: a third of the rate, and the driver may block the host during a copy
};

// Where bytes live while they are off Options::device.
enum class Home : std::uint8_t {
  kAuto,  // in host memory where the device is a GPU, on the disk where it is the CPU
  kHost,  // in host memory. With the CPU that saves no memory: it is for trying out what is meant for a GPU.
  kDisk,  // in a spill file. With the CPU only.
};

// How an Offloader works. All sizes are bytes. nullopt means that ebb chooses.
struct Options {
  // false: every guard of this offloader does nothing, and autograd saves as if ebb were not there.
  bool enabled = true;

  // The device to relieve. nullopt: the current CUDA device if there is one, else the CPU.
  std::optional<c10::Device> device = std::nullopt;

  // What leaves the device. nullptr: minimum_size(1 MiB) (policy/policies.h has the measurement behind it).
  std::shared_ptr<Policy> policy = nullptr;

  // A budget for device memory. A plan, instead of `policy`, then decides what stays on the device, what is moved and
  // what is recomputed. The plan is made from the first steps, in which everything is moved or recomputed
  // (docs/planning.md), and bounds stash and window, too. Values: DeviceBytes{n}, ShareOfFree{0.9} (GPU only),
  // Slowdown{0.02} or LeastMemory{}. A budget that is too small is an error in the step after those first steps; the
  // error names the least that can be reached.
  std::optional<DeviceBudget> device_budget = std::nullopt;

  // With a budget, storages with fewer bytes stay on the device, and count as other memory to the plan.
  std::uint64_t planned_minimum_bytes = kDefaultMinimumBytes;

  // true: a budget that is too small is a warning instead of an error, and the plan uses as little memory as possible.
  bool device_budget_is_a_wish = false;

  // Measures the memory that a budget bounds, in the steps from which a plan is made and in a step that checks the
  // plan. Empty: on a GPU the meter is LibTorch's allocator, and each call resets the allocator's peak
  // (resetPeakStats). On the CPU LibTorch does not count, and a budget then bounds saved storages alone.
  DeviceMeter device_meter = {};

  // GPU only: what to evict when the device has no memory left, until enough memory is free (Note [Out of memory] in
  // out_of_memory.h). Managed storages that are not in use go home first, of these the storage that is expected last.
  // Storages that the policy has kept are copied out next, of these the storage that was saved first. While the device
  // has memory left nothing is evicted.
  bool evict_when_out_of_memory = true;

  // The bound of the stash: device memory that is held only because copies out of it are not done. Over the bound, the
  // compute stream waits for the oldest copy. nullopt: a twelfth of the bytes that the last step offloaded, at most 2
  // GiB, but at least twice the bytes of the largest storage. Sources that are in the stash when backward begins stay
  // there for their use in backward, and count in the window. They do not count in the window while steps wait for
  // copies, unless window_bytes is set.
  std::optional<std::uint64_t> stash_bytes = std::nullopt;

  // The bound of the window: device memory that has been prefetched before its use in backward. nullopt: as for the
  // stash. While steps wait for copies, the share is twice that of the stash, and prefetching starts when backward
  // begins. A storage larger than a window that is set here is an error at its first save; the error names both sizes.
  std::optional<std::uint64_t> window_bytes = std::nullopt;

  // Where bytes live while they are off the device. Without effect where the caller gives a tier.
  Home home = Home::kAuto;

  // GPU only: how the bytes are kept in host memory.
  HostMemory host_memory = HostMemory::kPinned;

  // The most host memory (GPU) or spill file (CPU) to use. Storages that find no room stay on the device, counted.
  // nullopt: whatever the system gives.
  std::optional<std::uint64_t> capacity_bytes = std::nullopt;

  // Warn once when more than this fraction of the machine's memory is in use. In (0, 1].
  double host_memory_warning = 0.6;

  // On a disk: the folder of the spill file, which is never visible there, and what reads and writes that file. The
  // folder must belong to this user or to root, and nobody else may write to the folder unless it is sticky, as
  // /var/tmp is.
  std::filesystem::path spill_folder = "/var/tmp";
  DiskIo disk_io = DiskIo::kAuto;

  // CPU only: freed blocks of 256 KiB and more go back to the system instead of staying with malloc. The process's
  // resident memory then falls when saves are offloaded (Note [Memory that malloc keeps] in
  // streams/disk/mmap_allocator.h). The first offloader with this option replaces LibTorch's CPU allocator for all
  // tensors, unless the program has set an allocator by then. The new allocator stays for the rest of the process.
  // false: LibTorch's CPU allocator stays.
  bool return_freed_memory = true;

  // Record a sample whenever the saved bytes on the device change (Offloader::take_timeline).
  bool record_timeline = false;

  // Record every copy and stall, and every pack and unpack of a tensor that is not passed through
  // (Offloader::take_trace). Costs one more event for each copy. With a tier of the caller's only packs and unpacks are
  // recorded.
  bool record_trace = false;
};

// Throws std::invalid_argument with one sentence that names the option, its value and what would be accepted.
// Warns, and does not throw, for a spill folder on tmpfs.
void validate(const Options& options);

}  // namespace ebb

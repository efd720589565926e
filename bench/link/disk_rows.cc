#include "bench/link/rows.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <optional>
#include <random>
#include <span>
#include <stdexcept>
#include <utility>
#include <vector>

#include <xxhash.h>

#include "bench/common/percentile.h"
#include "bench/link/disk_rates.h"
#include "offload/base/human_bytes.h"
#include "streams/base/aligned_memory.h"
#include "streams/disk/io_job.h"
#include "streams/disk/uring_io.h"

namespace ebb {
namespace {

constexpr std::array<std::size_t, 4> kBlockSizes{64 << 10, 1 << 20, 4 << 20, 16 << 20};
constexpr std::array<unsigned, 2> kInFlight{1, 8};
constexpr std::size_t kLargestBlock = kBlockSizes.back();
constexpr std::uint64_t kLeastFileBytes = kInFlight.back() * kLargestBlock;
constexpr std::size_t kBacklog = std::numeric_limits<std::size_t>::max();
constexpr std::uint64_t kMemoryBytes = std::uint64_t{256} << 20;

struct Method {
  enum class Of : std::uint8_t { kDisk, kTier, kChecks };
  const char* name;
  Of what;
  std::function<double(const DiskLoad&)> gb_per_s;
  std::vector<double> samples{};  // GB/s of the load that is being measured, one for each repetition
};

std::uint64_t whole_blocks(std::uint64_t file_bytes) {
  if (file_bytes < kLeastFileBytes) {
    throw std::invalid_argument("a file of " + human_bytes(file_bytes) + " is too small to measure a disk with: " +
                                human_bytes(kLeastFileBytes) + " are the least");
  }
  return file_bytes / kLargestBlock * kLargestBlock;
}

void fill_randomly(std::span<std::byte> memory) {
  std::mt19937_64 random;
  for (std::size_t at = 0; at < memory.size(); at += sizeof(std::uint64_t)) {
    const std::uint64_t number = random();
    std::memcpy(memory.data() + at, &number, sizeof(number));
  }
}

void take_samples(const DiskLoad& load, int repetitions, std::vector<Method>& methods) {
  for (Method& method : methods) {
    method.samples.clear();
    static_cast<void>(method.gb_per_s(load));  // the one that does not count
  }
  for (int repetition = 0; repetition < repetitions; ++repetition) {
    for (std::size_t i = 0; i < methods.size(); ++i) {
      Method& method = methods[(static_cast<std::size_t>(repetition) + i) % methods.size()];
      method.samples.push_back(method.gb_per_s(load));
    }
  }
}

const std::vector<double>& fastest_raw(const std::vector<Method>& methods) {
  const auto key = [](const Method& method) {
    return method.what == Method::Of::kDisk ? percentile(method.samples, 0.5) : 0;
  };
  return std::max_element(methods.begin(), methods.end(),
                          [&](const Method& a, const Method& b) { return key(a) < key(b); })
      ->samples;
}

void add_rows(const DiskPlan& plan, const DiskLoad& load, const std::vector<Method>& methods, ResultRows& rows) {
  const std::vector<double>& raw = fastest_raw(methods);
  for (const Method& method : methods) {
    nlohmann::json row{{"measure", "disk"},
                       {"method", method.name},
                       {"direction", load.kind == IoKind::kWrite ? "write" : "read"},
                       {"block_bytes", load.block_bytes},
                       {"in_flight", load.in_flight},
                       {"spill_folder", plan.folder.string()},
                       {"file_bytes", whole_blocks(plan.file_bytes)},
                       {"repetitions", plan.repetitions},
                       {"device", plan.device}};
    add_spread(row, "gb_per_s", method.samples);
    if (method.what == Method::Of::kTier) {
      std::vector<double> ratios;
      for (std::size_t i = 0; i < raw.size(); ++i) {
        ratios.push_back(method.samples[i] / raw[i]);
      }
      add_spread(row, "over_raw", ratios);
    }
    rows.add(std::move(row));
  }
}

struct Measured {
  const RawDisk& raw;
  DiskTierRate& tier;
  DiskTierRate* with_threads;  // null where io_uring may not be used, so that `tier` has them
  std::span<const std::byte> memory;
};

// GB/s (1e9 bytes) at which one thread copies and hashes what an I/O thread copies and hashes of such a load (Note
// [Checked chunks] in streams/disk/io_slot.h): a write's chunks go to buffers, one for each that may be in flight, and
// are hashed there; a read's are hashed where they are. One pass over `memory`.
double chunk_check_gb_per_s(const DiskLoad& load, std::span<const std::byte> memory) {
  const std::size_t chunks_a_block = (load.block_bytes + IoJob::kChunkBytes - 1) / IoJob::kChunkBytes;
  std::vector<AlignedMemory> buffers(std::min<std::size_t>(load.in_flight * chunks_a_block, UringIo::kDepth));
  for (AlignedMemory& buffer : buffers) {
    buffer = allocate_pages(IoJob::kChunkBytes);
    std::memset(buffer.get(), 0, IoJob::kChunkBytes);  // the system provides its pages now
  }
  const std::size_t chunk_bytes = std::min(load.block_bytes, IoJob::kChunkBytes);
  std::uint64_t sum = 0;
  std::size_t count = 0;
  const auto start = std::chrono::steady_clock::now();
  for (std::size_t at = 0; at < memory.size(); at += chunk_bytes) {
    const std::size_t bytes = std::min(chunk_bytes, memory.size() - at);
    const std::byte* chunk = memory.data() + at;
    if (load.kind == IoKind::kWrite) {
      std::byte* const buffer = buffers[count++ % buffers.size()].get();
      std::memcpy(buffer, chunk, bytes);
      chunk = buffer;
    }
    sum += ::XXH3_64bits(chunk, bytes);
  }
  [[maybe_unused]] const volatile std::uint64_t all_hashed = sum;
  const std::chrono::duration<double, std::nano> ns = std::chrono::steady_clock::now() - start;
  return static_cast<double>(memory.size()) / ns.count();
}

std::vector<Method> methods_for(unsigned in_flight, const Measured& m) {
  using Of = Method::Of;
  const bool has_uring = m.with_threads != nullptr;
  std::vector<Method> methods;
  if (has_uring) {
    methods.push_back({"raw_io_uring", Of::kDisk, [&](const DiskLoad& load) { return m.raw.uring_gb_per_s(load); }});
  }
  methods.push_back({"raw_threads", Of::kDisk, [&](const DiskLoad& load) { return m.raw.threads_gb_per_s(load); }});
  methods.push_back(
      {"disk_tier", Of::kTier, [&](const DiskLoad& load) { return m.tier.gb_per_s(load.kind, load.in_flight); }});
  if (in_flight == kInFlight.back()) {
    methods.push_back(
        {"disk_tier_backlog", Of::kTier, [&](const DiskLoad& load) { return m.tier.gb_per_s(load.kind, kBacklog); }});
  }
  if (has_uring) {
    methods.push_back({"disk_tier_threads", Of::kTier,
                       [&](const DiskLoad& load) { return m.with_threads->gb_per_s(load.kind, load.in_flight); }});
  }
  methods.push_back(
      {"checks", Of::kChecks, [&](const DiskLoad& load) { return chunk_check_gb_per_s(load, m.memory); }});
  return methods;
}

}  // namespace

void check(const DiskPlan& plan) {
  static_cast<void>(whole_blocks(plan.file_bytes));
  const RawDisk no_more_than_a_page(plan.folder, kPageBytes, {});
}

void add_disk_rows(const DiskPlan& plan, ResultRows& rows) {
  const std::uint64_t file_bytes = whole_blocks(plan.file_bytes);
  const std::size_t memory_bytes = std::min(file_bytes, kMemoryBytes);
  const AlignedMemory owner = allocate_pages(memory_bytes);
  const std::span<std::byte> memory(owner.get(), memory_bytes);
  fill_randomly(memory);
  const RawDisk raw(plan.folder, file_bytes, memory);
  DiskTierRate tier(plan.folder, file_bytes, memory, DiskIo::kAuto);
  std::optional<DiskTierRate> with_threads;
  if (!UringIo::refusal()) {
    with_threads.emplace(plan.folder, file_bytes, memory, DiskIo::kThreads);
  }
  const Measured measured{raw, tier, with_threads ? &*with_threads : nullptr, memory};

  for (const std::size_t block_bytes : kBlockSizes) {
    tier.lease_blocks_of(block_bytes);
    if (with_threads) {
      with_threads->lease_blocks_of(block_bytes);
    }
    for (const unsigned in_flight : kInFlight) {
      std::vector<Method> methods = methods_for(in_flight, measured);
      for (const IoKind kind : {IoKind::kWrite, IoKind::kRead}) {  // what is read has been written in such blocks
        const DiskLoad load{kind, block_bytes, in_flight};
        take_samples(load, plan.repetitions, methods);
        add_rows(plan, load, methods, rows);
      }
    }
  }
}

}  // namespace ebb

// Saves that are to move and find no room, each of a storage of its own, on the CPU over the spill file and on a GPU
// over pinned host memory. "_capacity": Options::capacity_bytes is used up. "_file_limit": the process's file size
// limit ends where the spill file ends, so that the file can grow by neither a slab nor a block. "_system": the system
// refuses, asked for more than it has. "kept_by_policy" stands beside them: a save of the same size that never was to
// move.

#include <sys/resource.h>

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/from_blob.h>
#include <benchmark/benchmark.h>
#include <torch/csrc/autograd/saved_variable.h>

#include "bench/overhead/rows.h"
#include "examples/common/device.h"
#include "offload/guard.h"
#include "offload/offloader.h"
#include "policy/policies.h"

namespace ebb {
namespace {

using torch::autograd::SavedVariable;

enum class Why : std::uint8_t { kPolicy, kCapacity, kFileLimit, kSystem };

constexpr std::int64_t kSaves = 100;
constexpr std::int64_t kPageOfFloats = 1 << 10;
constexpr std::int64_t kSlabOfFloats = 1 << 24;                 // as much as a spill file grows by at least
constexpr std::int64_t kTooManyFloats = std::int64_t{1} << 48;  // a pebibyte

// A file of this process may end where `bytes` end.
class FileSizeLimit {
 public:
  explicit FileSizeLimit(std::uint64_t bytes) {
    ::getrlimit(RLIMIT_FSIZE, &before_);
    const rlimit limit{bytes, before_.rlim_max};
    ::setrlimit(RLIMIT_FSIZE, &limit);
  }
  ~FileSizeLimit() { ::setrlimit(RLIMIT_FSIZE, &before_); }
  FileSizeLimit(const FileSizeLimit&) = delete;
  FileSizeLimit& operator=(const FileSizeLimit&) = delete;

 private:
  rlimit before_{};
};

Options options_for(Why why, c10::Device device) {
  Options options;
  options.device = device;
  options.policy = why == Why::kPolicy ? keep_everything(1) : offload_everything();
  options.host_memory_warning = 1.0;  // how full this machine is is not the question
  if (why == Why::kCapacity) {
    options.capacity_bytes = kPageOfFloats * sizeof(float);
  }
  return options;
}

class NoRoom {
 public:
  NoRoom(Why why, c10::Device device) : why_(why), device_(device), offloader_(options_for(why, device)) {
    const at::Tensor leaf = floats(why == Why::kFileLimit ? kSlabOfFloats : kPageOfFloats).requires_grad_();
    if (why == Why::kCapacity || why == Why::kFileLimit) {
      const OffloadGuard guard(offloader_);
      first_.emplace(leaf.neg(), /*is_output=*/false);
    }
    const at::Tensor page = floats(kPageOfFloats).requires_grad_();
    for (std::int64_t i = 0; i < kSaves; ++i) {
      tensors_.push_back(why == Why::kSystem ? too_large() : page.neg());
    }
    synchronize(device_);
  }

  // The seconds of all saves.
  double run() {
    const OffloadGuard guard(offloader_);
    std::optional<FileSizeLimit> limit;
    if (why_ == Why::kFileLimit) {
      limit.emplace(kSlabOfFloats * sizeof(float));
    }
    std::vector<SavedVariable> saves;
    saves.reserve(kSaves);
    const Stopwatch watch;
    for (const at::Tensor& tensor : tensors_) {
      saves.emplace_back(tensor, /*is_output=*/false);
    }
    return watch.seconds();
  }

  // Whether the passes so far were what they were to be.
  [[nodiscard]] bool nothing_moved() const {
    const Stats stats = offloader_.stats();
    const std::uint64_t moved = first_ ? 1 : 0;
    const KeptReason reason = why_ == Why::kPolicy ? KeptReason::kPolicy : KeptReason::kNoRoom;
    return stats.offloaded.tensors == moved && stats.kept_for(reason).tensors + moved == stats.saved.tensors;
  }

 private:
  [[nodiscard]] at::Tensor floats(std::int64_t count) const { return at::zeros({count}, at::device(device_)); }

  // One that says it has that many: nobody reads what does not move.
  [[nodiscard]] at::Tensor too_large() const {
    at::Tensor page = floats(kPageOfFloats);
    void* const data = page.data_ptr();
    return at::from_blob(
        data, {kTooManyFloats}, [page](void* /*data*/) {}, at::device(device_));
  }

  const Why why_;
  const c10::Device device_;
  Offloader offloader_;
  std::optional<SavedVariable> first_;  // which takes what there is
  std::vector<at::Tensor> tensors_;
};

void run(benchmark::State& state, Why why, c10::Device device) {
  NoRoom saves(why, device);
  saves.run();
  double total = 0;
  for (auto _ : state) {
    const double seconds = saves.run();
    state.SetIterationTime(seconds);
    total += seconds;
  }
  state.counters["ns_per_save"] = kNanoseconds * total / static_cast<double>(state.iterations() * kSaves);
  if (!saves.nothing_moved()) {
    state.SkipWithError("a save found room, or was kept for another reason");
  }
}

}  // namespace

void register_no_room() {
  struct Named {
    const char* name;
    Why why;
  };
  constexpr std::array kRows{Named{"kept_by_policy", Why::kPolicy}, Named{"no_room_capacity", Why::kCapacity},
                             Named{"no_room_file_limit", Why::kFileLimit}, Named{"no_room_system", Why::kSystem}};
  const auto add = [](const Named& row, const char* where, c10::Device device) {
    benchmark::RegisterBenchmark((std::string(row.name) + where).c_str(), [why = row.why,
                                                                           device](benchmark::State& state) {
      run(state, why, device);
    })->UseManualTime();
  };
  for (const Named& row : kRows) {
    add(row, "_disk_tier", c10::kCPU);
  }
  for (const Named& row : kRows) {
    if (row.why == Why::kFileLimit) {
      continue;
    }
    if (has_gpu()) {
      add(row, "_pinned_tier", kGpu);
    } else {
      skip_without_gpu(std::string(row.name) + "_pinned_tier");
    }
  }
}

}  // namespace ebb

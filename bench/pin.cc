// Question: how fast can host memory be made ready for copies to and from a GPU, and how much of it is wasted?
//
// In each repetition every method makes slabs of one size until the total is reached. Reported are the rate (GiB/s of
// memory that is ready), how much of the process is resident for each byte asked for, and the rate of a copy from the
// GPU to such memory (GB/s, 1e9 bytes): each as the median and the 10th and 90th percentile over repetitions, after one
// that does not count.

#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <CLI/CLI.hpp>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

#include "bench/bytes.h"
#include "bench/command_line.h"
#include "bench/device.h"
#include "bench/device_buffer.h"
#include "bench/numa.h"
#include "bench/pin_methods.h"
#include "bench/result_rows.h"
#include "streams/gpu/cuda_event.h"

namespace ebb {
namespace {

constexpr double kGiB = 0x1p30;
constexpr std::size_t kCopyBytes = std::size_t{256} << 20;
constexpr std::size_t kSlabsAtOnce = 4;

struct PinOptions {
  std::string device = "auto";
  std::uint64_t bytes = std::uint64_t{4} << 30;
  std::vector<std::uint64_t> slab_bytes{64 << 20, 256 << 20, 1 << 30};
  int repetitions = 5;
  std::filesystem::path out;
};

std::optional<int> parse_options(int argc, char** argv, PinOptions& options) {
  CLI::App app("Times the ways to host memory that a GPU can copy to and from.", "pin");
  app.add_option("--device", options.device, "auto, cpu, cuda or cuda:N")->capture_default_str();
  app.add_option("--bytes", options.bytes, "To make ready in all; default: 4GiB")->transform(size_text());
  app.add_option("--slab-bytes", options.slab_bytes,
                 "In pieces of; default: 64MiB 256MiB 1GiB. Of each size, 4 are also registered at once")
      ->transform(size_text());
  app.add_option("--repetitions", options.repetitions, "Of each measurement, after one that does not count")
      ->check(positive())
      ->capture_default_str();
  app.add_option("--out", options.out, "Write the results here as JSON")->type_name("FILE");
  if (const std::optional<int> status = parse_command_line(app, argc, argv)) {
    return status;
  }
  for (const std::uint64_t slab_bytes : options.slab_bytes) {
    if (slab_bytes > options.bytes) {
      throw std::invalid_argument("--bytes " + format_bytes(options.bytes) + " is less than one slab of " +
                                  format_bytes(slab_bytes));
    }
  }
  return std::nullopt;
}

// What a driver holds for the process, and not in it, is not counted. The machine's free memory would count that too,
// but tells nothing: a kernel keeps some of what was just freed with each processor, and counts it as used.
double resident_bytes() {
  std::ifstream file("/proc/self/statm");
  double all_pages = 0;
  double resident_pages = 0;
  file >> all_pages >> resident_pages;
  return resident_pages * static_cast<double>(sysconf(_SC_PAGESIZE));
}

// GB/s of a copy of 256 MiB, or of all there is, to the slabs: in one piece where they are as large.
double copy_gb_per_s(const DeviceBuffer& source, const std::vector<PinnedSlab>& slabs, c10::cuda::CUDAStream stream) {
  const c10::cuda::CUDAGuard device(stream.device());
  CudaEventPool& events = CudaEventPool::of(stream.device(), CudaEventPool::Timing::kOn);
  std::size_t copied = 0;
  const auto copy = [&] {
    copied = 0;
    for (const PinnedSlab& slab : slabs) {
      const std::size_t bytes = std::min(slab.bytes, kCopyBytes - copied);
      if (bytes == 0) {
        break;
      }
      C10_CUDA_CHECK(
          cudaMemcpyAsync(slab.memory.get(), source.data() + copied, bytes, cudaMemcpyDeviceToHost, stream.stream()));
      copied += bytes;
    }
  };
  copy();  // an idle link is slow to wake
  const CudaEvent start(events, stream);
  copy();
  const CudaEvent end(events, stream);
  end.synchronize();
  constexpr double kBytesPerMsInGbPerS = 1e6;
  return static_cast<double>(copied) / end.ms_since(start) / kBytesPerMsInGbPerS;
}

struct Samples {
  std::vector<double> gib_per_s;
  std::vector<double> touch_s;  // of all slabs together; empty where a method has no such step
  std::vector<double> register_s;
  std::vector<double> resident_over_asked;
  std::vector<double> copy_gb_per_s;
};

void take_sample(const PinMethod& method, std::size_t slab_bytes, std::size_t count, const DeviceBuffer& source,
                 c10::cuda::CUDAStream stream, Samples& samples) {
  const double resident_before = resident_bytes();
  std::vector<PinnedSlab> slabs;
  double total_s = 0;
  double touch_s = 0;
  double register_s = 0;
  for (std::size_t i = 0; i < count; ++i) {
    slabs.push_back(method.make(slab_bytes));
    total_s += slabs.back().total_s;
    touch_s += slabs.back().touch_s.value_or(0);
    register_s += slabs.back().register_s.value_or(0);
  }
  const double asked = static_cast<double>(slab_bytes * count);
  samples.gib_per_s.push_back(asked / kGiB / total_s);
  if (slabs.back().touch_s) {
    samples.touch_s.push_back(touch_s);
  }
  if (slabs.back().register_s) {
    samples.register_s.push_back(register_s);
  }
  samples.resident_over_asked.push_back((resident_bytes() - resident_before) / asked);
  samples.copy_gb_per_s.push_back(copy_gb_per_s(source, slabs, stream));
}

class PinBenchmark {
 public:
  PinBenchmark(const PinOptions& options, c10::Device device, ResultRows& rows)
      : options_(options), device_(device), rows_(rows) {}

  void run() {
    for (const std::uint64_t slab_bytes : options_.slab_bytes) {
      measure_methods(slab_bytes);
      measure_threads(slab_bytes);
    }
  }

 private:
  nlohmann::json make_row(const char* measure, std::uint64_t slab_bytes, std::size_t slabs) const {
    nlohmann::json row{{"measure", measure},
                       {"slab_bytes", slab_bytes},
                       {"slabs", slabs},
                       {"repetitions", options_.repetitions},
                       {"device", device_name(device_)}};
    const std::optional<int> nodes = numa_node_count();
    row["numa_nodes"] = nodes ? nlohmann::json(*nodes) : nlohmann::json();
    if (nodes && *nodes > 1) {
      const std::optional<int> nearest = nearest_numa_node(device_);
      row["nearest_numa_node"] = nearest ? nlohmann::json(*nearest) : nlohmann::json();
    }
    return row;
  }

  void measure_methods(std::uint64_t slab_bytes) {
    const std::size_t count = options_.bytes / slab_bytes;
    const std::vector<PinMethod> methods = pin_methods(device_);
    std::vector<Samples> samples(methods.size());
    for (int repetition = -1; repetition < options_.repetitions; ++repetition) {
      if (repetition == 0) {
        samples.assign(methods.size(), {});  // what was before does not count
      }
      for (std::size_t i = 0; i < methods.size(); ++i) {
        take_sample(methods[i], slab_bytes, count, source_, stream_, samples[i]);
      }
    }
    for (std::size_t i = 0; i < methods.size(); ++i) {
      nlohmann::json row = make_row("pin", slab_bytes, count);
      row["method"] = methods[i].name;
      add_spread(row, "gib_per_s", samples[i].gib_per_s);
      if (!samples[i].touch_s.empty()) {
        add_spread(row, "touch_s", samples[i].touch_s);
      }
      if (!samples[i].register_s.empty()) {
        add_spread(row, "register_s", samples[i].register_s);
      }
      add_spread(row, "resident_over_asked", samples[i].resident_over_asked);
      add_spread(row, "device_to_host_gb_per_s", samples[i].copy_gb_per_s);
      rows_.add(std::move(row));
    }
  }

  // Does CUDA register for several threads at once?
  void measure_threads(std::uint64_t slab_bytes) {
    std::vector<double> one;
    std::vector<double> four;
    std::vector<double> speed_up;
    for (int repetition = -1; repetition < options_.repetitions; ++repetition) {
      const double one_gib_per_s = register_gib_per_s(device_, kSlabsAtOnce, slab_bytes, /*at_once=*/false);
      const double four_gib_per_s = register_gib_per_s(device_, kSlabsAtOnce, slab_bytes, /*at_once=*/true);
      if (repetition >= 0) {
        one.push_back(one_gib_per_s);
        four.push_back(four_gib_per_s);
        speed_up.push_back(four_gib_per_s / one_gib_per_s);
      }
    }
    nlohmann::json row = make_row("register_at_once", slab_bytes, kSlabsAtOnce);
    add_spread(row, "one_thread_gib_per_s", one);
    add_spread(row, "four_threads_gib_per_s", four);
    add_spread(row, "speed_up", speed_up);
    rows_.add(std::move(row));
  }

  const PinOptions& options_;
  const c10::Device device_;
  ResultRows& rows_;
  const DeviceBuffer source_{device_, kCopyBytes};
  const c10::cuda::CUDAStream stream_ = c10::cuda::getStreamFromPool(/*isHighPriority=*/false, device_.index());
};

int run(int argc, char** argv) {
  PinOptions options;
  if (const auto code = parse_options(argc, argv, options)) {
    return *code;
  }
  const c10::Device device = pick_device(options.device);
  ResultRows rows(options.out);
  if (device.is_cuda()) {
    PinBenchmark(options, device, rows).run();
  } else {
    std::cerr << "pin: without a GPU there is nothing to pin\n";
    rows.save();
  }
  return 0;
}

}  // namespace
}  // namespace ebb

int main(int argc, char** argv) {
  return ebb::run_benchmark("pin", [&] { return ebb::run(argc, argv); });
}

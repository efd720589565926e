#include "test/machine.h"

#include <cstdlib>
#include <exception>
#include <iostream>

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <c10/core/CPUAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/util/Exception.h>
#include <spdlog/spdlog.h>

#include "test/simulated/simulated_device_allocator.h"

namespace ebb {
namespace {

constexpr int kUnusable = 2;

}  // namespace

void add_device_flag(CLI::App& app, std::string& name) {
  app.add_option("--device", name)->check(CLI::IsMember({"cpu", "cuda"}))->capture_default_str();
}

std::optional<int> parse(CLI::App& app, int argc, char** argv) {
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : kUnusable;
  }
  return std::nullopt;
}

c10::Device prepare_device(const std::string& name) {
  at::set_num_threads(1);                 // tensors are small, and the programs have threads of their own
  spdlog::set_level(spdlog::level::off);  // each of thousands of offloaders says at its end what it has bought
  if (name == "cpu") {
    // Never destroyed: tensors of static lifetime may outlive it.
    c10::SetCPUAllocator(new SimulatedDeviceAllocator, /*priority=*/255);
    return {c10::kCPU};
  }
  TORCH_CHECK(c10::cuda::device_count() > 0, "--device cuda: this machine has no GPU that can be used");
  setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8", /*overwrite=*/0);  // or matrix products differ from run to run
  at::globalContext().setDeterministicAlgorithms(true, /*warn_only=*/true);
  at::globalContext().lazyInitDevice(c10::kCUDA);  // or LibTorch's allocator knows no device until the first tensor
  return {c10::kCUDA, 0};
}

int status_of(const char* program, const std::function<int()>& run) {
  try {
    return run();
  } catch (const c10::Error& error) {
    std::cerr << program << ": error: " << error.what_without_backtrace() << "\n";
  } catch (const std::exception& error) {
    std::cerr << program << ": error: " << error.what() << "\n";
  }
  return kUnusable;
}

}  // namespace ebb

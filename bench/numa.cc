#include "bench/numa.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <filesystem>
#include <fstream>
#include <string>
#include <system_error>

#include <c10/cuda/CUDAException.h>
#include <cuda_runtime_api.h>

namespace ebb {
namespace {

// "node0", "node1", ...: other entries of that folder have no digits.
bool is_node(const std::string& name) {
  constexpr std::size_t kPrefix = 4;
  return name.size() > kPrefix && name.compare(0, kPrefix, "node") == 0 &&
         std::all_of(name.begin() + kPrefix, name.end(), [](unsigned char c) { return std::isdigit(c) != 0; });
}

}  // namespace

std::optional<int> numa_node_count() {
  int count = 0;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator("/sys/devices/system/node", error)) {
    count += is_node(entry.path().filename().string()) ? 1 : 0;
  }
  return count > 0 ? std::optional(count) : std::nullopt;
}

std::optional<int> nearest_numa_node(c10::Device gpu) {
  std::array<char, 32> id{};  // "0000:3B:00.0"
  C10_CUDA_CHECK(cudaDeviceGetPCIBusId(id.data(), static_cast<int>(id.size()), gpu.index()));
  std::string name = id.data();
  std::transform(name.begin(), name.end(), name.begin(), [](unsigned char c) { return std::tolower(c); });
  std::ifstream file("/sys/bus/pci/devices/" + name + "/numa_node");
  int node = -1;  // also what the system writes where it does not know
  return file >> node && node >= 0 ? std::optional(node) : std::nullopt;
}

}  // namespace ebb

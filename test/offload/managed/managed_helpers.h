#pragma once

#include <cstddef>
#include <cstdint>
#include <sstream>
#include <string>
#include <vector>

#include <ATen/Functions.h>
#include <catch2/catch.hpp>
#include <torch/optim/optimizer.h>
#include <torch/serialize/archive.h>

#include "offload/parameters.h"

namespace ebb::test {

inline Parameters within(std::uint64_t device_bytes) {
  Parameters how;
  how.device_bytes = device_bytes;
  how.minimum_bytes = 0;
  return how;
}

inline bool is_away(const at::Tensor& tensor) {
  return tensor.storage().unsafeGetStorageImpl()->_mutable_data_ptr_no_checks().get() == nullptr;
}

inline void check_equal(const std::vector<at::Tensor>& expected, const std::vector<at::Tensor>& found) {
  REQUIRE(expected.size() == found.size());
  for (std::size_t i = 0; i < expected.size(); ++i) {
    INFO(i);
    CHECK(at::equal(expected[i], found[i]));
  }
}

// What an optimizer saves, and has that loaded.
inline std::string archive_of(const torch::optim::Optimizer& optimizer) {
  torch::serialize::OutputArchive archive;
  optimizer.save(archive);
  std::ostringstream stream;
  archive.save_to(stream);
  return stream.str();
}

inline void load_archive(const std::string& bytes, torch::optim::Optimizer& optimizer) {
  std::istringstream stream(bytes);
  torch::serialize::InputArchive archive;
  archive.load_from(stream);
  optimizer.load(archive);
}

}  // namespace ebb::test

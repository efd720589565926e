#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include <ATen/Functions.h>
#include <catch2/catch.hpp>

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

}  // namespace ebb::test

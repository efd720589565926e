#pragma once

#include <cstdint>

#include <c10/core/TensorImpl.h>

#include "offload/base/libtorch_members.h"

namespace ebb {

// Which version counter a tensor has, and the counter's number: two saves of one storage have equal bytes if both
// counter and number are equal. The number alone would not do, because `.data()` and `set_` make tensors over one
// storage that have counters of their own.
//
// Lifetime: a counter's address may be used again after the counter's end, so the owner of a VersionId keeps the
// counter alive.
struct VersionId {
  explicit VersionId(const c10::VariableVersion& version)
      : counter(counter_of(version)), number(version.current_version()) {}
  VersionId() = default;

  friend bool operator==(const VersionId&, const VersionId&) = default;

  const void* counter = nullptr;
  std::uint32_t number = 0;
};

}  // namespace ebb

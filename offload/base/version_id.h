#pragma once

#include <cstdint>
#include <cstring>

#include <c10/core/TensorImpl.h>

namespace ebb {

// Which version counter a tensor has, and the counter's number: two saves of one storage have equal bytes if both
// counter and number are equal. The number alone would not do, because `.data()` and `set_` make tensors over one
// storage that have counters of their own.
//
// Lifetime: a counter's address may be used again after the counter's end, so the owner of a VersionId keeps the
// counter alive.
struct VersionId {
  // Note [Identity of a version counter]
  // c10::VariableVersion is one pointer to the shared counter and offers no way to compare it, so its bytes are
  // compared.
  explicit VersionId(const c10::VariableVersion& version) : number(version.current_version()) {
    static_assert(sizeof(c10::VariableVersion) == sizeof(counter));
    // NOLINTNEXTLINE(bugprone-undefined-memory-manipulation): reads one pointer and owns nothing
    std::memcpy(&counter, &version, sizeof(counter));
  }
  VersionId() = default;

  friend bool operator==(const VersionId&, const VersionId&) = default;

  const void* counter = nullptr;
  std::uint32_t number = 0;
};

}  // namespace ebb

#pragma once

#include <cstddef>
#include <cstdint>

#include <ATen/core/dispatch/Dispatcher.h>

namespace ebb {

// What ebb has to know of an operator, made once for each operator from its schema.
//
// Threads: any.
struct OperatorTraits {
  enum class Kind : std::uint8_t {
    kUsesBytes,     // of its arguments, while it runs
    kUsesNoBytes,   // makes views, or looks at sizes alone
    kMakesAlike,    // a new tensor of the argument's sizes, all elements equal
    kPlaceByPlace,  // does the same at each place of its lists, independently of other places
    kCollective,    // a process group's: gives a c10d::Work, and uses bytes until that is over
  };

  Kind kind = Kind::kUsesBytes;
  std::uint64_t written = 0;  // bit i: the operator may write to argument i

  [[nodiscard]] bool may_write_to(std::size_t argument) const {
    return argument >= 64 || ((written >> argument) & 1) != 0;
  }

  static OperatorTraits of(const c10::OperatorHandle& operation);
};

}  // namespace ebb

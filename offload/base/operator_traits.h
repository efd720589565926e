#pragma once

#include <cstddef>
#include <cstdint>

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/DispatchKeySet.h>

namespace ebb {

// Whether all results are views of the arguments, by the schema. A composite operator (reshape, to) may also copy, by
// calls of its own.
[[nodiscard]] bool only_makes_views(const c10::FunctionSchema& schema);

// What ebb has to know of an operator, made once for each operator from its schema, its tags and its kernels.
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

  // Whether the operator, run again on the same bytes, gives the same bytes.
  enum class Again : std::uint8_t {
    kNo,  // another process takes part, a schema may not say what is written, memory is not filled, or nobody knows
    kYes,
    kDraws,  // from the random numbers of a generator: if the generator is in the same state
  };

  Kind kind = Kind::kUsesBytes;
  Again again = Again::kNo;
  bool makes_views = false;           // only_makes_views()
  bool is_composite_on_cpu = false;   // calls other operators through the dispatcher, and has no kernel of its own
  bool is_composite_on_cuda = false;  // the same
  bool is_cast = false;               // autocast may cast its arguments, and then calls the operator anew
  bool writes_all = false;            // of the memory of what it writes, whatever was there
  bool is_compute_bound = false;      // arithmetic that grows faster than the bytes: matmul, attention, convolution
  bool is_convolution = false;
  bool may_vary = false;         // unless algorithms are deterministic, its bits may differ from run to run
  std::uint64_t written = 0;     // bit i: the operator may write to argument i
  std::uint64_t statistics = 0;  // bit i: argument i is written but not read in training, and read only otherwise
  std::uint8_t training = 0;     // the argument that says whether this is training, where there are statistics

  [[nodiscard]] bool may_write_to(std::size_t argument) const {
    return argument >= 64 || ((written >> argument) & 1) != 0;
  }

  static OperatorTraits of(const c10::OperatorHandle& operation);
};

}  // namespace ebb

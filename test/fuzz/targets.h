#pragma once

#include <cstdint>
#include <span>

namespace ebb {

using FuzzInput = std::span<const std::uint8_t>;

// One for each parser of user input: feeds it any bytes, which it must answer with a value or with its one documented
// error. Throws std::logic_error where it does neither. The tests replay test/fuzz/corpus/NAME with them.
void fuzz_bytes(FuzzInput input);            // a size
void fuzz_train_options(FuzzInput input);    // the training program's arguments, one a line
void fuzz_step_options(FuzzInput input);     // the step benchmark's, likewise
void fuzz_offload_options(FuzzInput input);  // ebb::Options, its fields one behind another
void fuzz_tensor_file(FuzzInput input);      // a checkpoint, as it is and with its checksum made right

struct FuzzTarget {
  const char* name;
  void (*run)(FuzzInput input);
};

inline constexpr FuzzTarget kFuzzTargets[] = {
    {"bytes", fuzz_bytes},
    {"train_options", fuzz_train_options},
    {"step_options", fuzz_step_options},
    {"offload_options", fuzz_offload_options},
    {"tensor_file", fuzz_tensor_file},
};

// Throws std::logic_error with `what` unless it holds.
void require_of_parser(bool holds, const char* what);

}  // namespace ebb

#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <c10/core/ScalarType.h>

#include "test/random/operation.h"

namespace ebb::graphs {

// One line of a program: `v<id> = operation(operands; numbers)`.
struct Instruction {
  const Operation* operation = nullptr;
  int id = 0;                 // names the result; unique in its thread, and kept when other lines are removed
  std::vector<int> operands;  // of backward and grad: the roots
  std::vector<int> inputs;    // of grad: what to derive by
  Numbers numbers{};
  bool kept = false;  // held to the thread's end, not only to its last use: the storage stays on the device
};

// The numbers of kMake operations: sizes, dtype, and a seed for the values.
[[nodiscard]] const std::vector<std::vector<std::int64_t>>& known_sizes();
[[nodiscard]] const std::vector<at::ScalarType>& known_types();

// What the first number of backward and grad says.
enum BackwardFlag : std::uint32_t {
  kRetain = 1,
  kCreate = 2,
  kElsewhere = 4,  // on a thread of its own
  kTwice = 8,      // grad only: on two threads at once, the graph retained
};

// What one thread does, in order. It shares nothing with the others but the tensors of "shared" and the offloaders.
using Thread = std::vector<Instruction>;

struct Program {
  std::vector<Thread> threads;
};

[[nodiscard]] std::size_t instructions(const Program& program);

// As lines of text that read like C++.
[[nodiscard]] std::string to_text(const Instruction& instruction);
[[nodiscard]] std::string to_text(const Program& program);

}  // namespace ebb::graphs

#pragma once

#include <c10/core/Device.h>

#include "test/random/program.h"
#include "test/random/record.h"

namespace ebb::graphs {

// Whether plain autograd itself refuses with the error of `refusal`, a backward pass that it did not refuse, if it is
// asked for more than the program asks.
//
// Note [Proof of a write]
// What a recipe takes is what a node has saved, behind the roots of the pass. So the program runs with plain autograd
// once more, up to that pass and with all graphs retained. Then each node behind the roots is run by itself, whether
// the pass would have come to it or not: a node whose save was written to says so, and names both versions. Of several
// saves that were written to (a norm's input and its bias), a node names one, so that types and sizes do not count. No
// node that names the versions of the refusal, no proof.
[[nodiscard]] bool plain_refuses_too(const Program& program, const Outcome& expected, const Difference& refusal,
                                     c10::Device device);

// Whether a node behind the roots of the pass that `refusal` is of has saved memory that the program has taken from a
// tensor, by other data or by resizing: what the node computes changes with what is written there.
[[nodiscard]] bool saved_memory_was_taken(const Program& program, const Outcome& expected, const Difference& refusal,
                                          c10::Device device);

}  // namespace ebb::graphs

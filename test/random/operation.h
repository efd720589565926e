#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

#include <ATen/core/Tensor.h>

namespace ebb::graphs {

using Tensors = std::vector<at::Tensor>;

// What an operation takes besides tensors. It makes them fit, by remainders, so that any numbers will do.
using Numbers = std::array<std::uint32_t, 3>;

enum class Kind : std::uint8_t {
  kCompute,   // a new tensor
  kView,      // another view of its first operand, or a copy in another form
  kIndex,     // as kCompute; its last operand wants integers or truth values
  kWrite,     // writes into its first operand and returns it
  kReturn,    // as kCompute; its backward returns what it has saved, so that its first operand had best be a leaf
  kData,      // gives a tensor other memory behind autograd's back
  kRegion,    // as kCompute, run by the interpreter in a checkpointed region, of ebb's or of the program's own
  kMake,      // a tensor from nothing: leaf, constant, shared. Run by the interpreter, as all that follow
  kScope,     // guard, no_op, no_grad, foreign, and leave, which ends the innermost of them
  kCrowd,     // many graphs of its first operand, which stay to the thread's end
  kGradient,  // writes into the gradients of all leaves and records all that is alive
  kBackward,  // autograd over earlier results
};

// One thing that a program can do.
//
// Note [Programs that always run]
// Operations fit their operands to one another (`fit`, remainders of numbers) and throw c10::Error where that is
// impossible. A program in which something was left out, or an operand replaced, is thus still a program: what cannot
// be computed is an error to compare, and what depends on it does nothing. That is what lets a failure shrink.
struct Operation {
  using Run = at::Tensor (*)(const Tensors& x, const Numbers& n);

  std::string_view name;
  Kind kind = Kind::kCompute;
  std::size_t operands = 1;
  Run run = nullptr;  // of the kinds up to kRegion
};

using Operations = std::vector<Operation>;

// All of a kind.
[[nodiscard]] const Operations& operations(Kind kind);

// The one of this name, which must exist.
[[nodiscard]] const Operation& operation(std::string_view name);

// The tables, a file each.
[[nodiscard]] Operations elementwise_operations();
[[nodiscard]] Operations reducing_operations();
[[nodiscard]] Operations combining_operations();
[[nodiscard]] Operations matrix_operations();
[[nodiscard]] Operations network_operations();
[[nodiscard]] Operations custom_operations();
[[nodiscard]] Operations view_operations();
[[nodiscard]] Operations index_operations();
[[nodiscard]] Operations write_operations();
[[nodiscard]] Operations returning_operations();
[[nodiscard]] Operations data_operations();
[[nodiscard]] Operations region_operations();
[[nodiscard]] Operations stream_operations();

// Helpers of the tables.

// A dimension of `tensor`; 0 for one without dimensions.
[[nodiscard]] std::int64_t dimension(const at::Tensor& tensor, std::uint32_t number);

// `number` modulo `size`. Throws if there is nothing to choose from.
[[nodiscard]] std::int64_t choose(std::uint32_t number, std::int64_t size);

// By the StorageImpl: is_alias_of() reads the address of memory, which a managed storage may not have.
[[nodiscard]] bool share_a_storage(const at::Tensor& a, const at::Tensor& b);

// Something that broadcasts to `like`'s sizes: `tensor` itself if it does, else its first value.
[[nodiscard]] at::Tensor fit(const at::Tensor& tensor, const at::Tensor& like);

// As a matrix: its leading dimensions as one.
[[nodiscard]] at::Tensor as_matrix(const at::Tensor& tensor);

}  // namespace ebb::graphs

#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

namespace ebb::graphs {

// One thing that a program computed: a tensor, bit for bit, or the text of an error. Holds no tensor once settled, so
// that it is not taken for a leak.
class Record {
 public:
  Record(int value, std::string what, const at::Tensor& tensor);
  Record(int value, std::string error);

  // Fetches the bytes. Until then a GPU may still be computing them.
  void settle();

  // In which way `found` is not the same; nothing if it is. Both settled.
  [[nodiscard]] std::optional<std::string> difference(const Record& found) const;

  [[nodiscard]] bool is_error() const { return what_ == "error"; }
  [[nodiscard]] std::string name() const { return what_ + " of v" + std::to_string(value_); }
  [[nodiscard]] int value() const { return value_; }
  [[nodiscard]] const std::string& text() const { return content_; }  // of an error

 private:
  int value_;
  std::string what_;
  std::string form_;  // dtype, sizes, strides, and the bits that views carry
  at::Tensor copy_;
  std::string content_;
};

// All that a program computed, thread by thread.
using Outcome = std::vector<std::vector<Record>>;

// Whether plain autograd's error and that of a saved tensor which is gone say the same, each with what it can know.
[[nodiscard]] bool same_error(const std::string& expected, const std::string& found);

// The first thing that is not the same.
struct Difference {
  std::string text;
  std::size_t thread = 0;
  int value = 0;      // that was found there
  std::string error;  // that was found, empty if it is none
};

// Nothing if the outcomes are the same.
[[nodiscard]] std::optional<Difference> first_difference(const Outcome& expected, const Outcome& found);

// The same as text.
[[nodiscard]] std::optional<std::string> difference(const Outcome& expected, const Outcome& found);

}  // namespace ebb::graphs

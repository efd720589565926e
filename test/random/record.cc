#include "test/random/record.h"

#include <algorithm>
#include <regex>
#include <sstream>

#include <ATen/core/grad_mode.h>

namespace ebb::graphs {
namespace {

std::string form_of(const at::Tensor& tensor) {
  if (!tensor.defined()) {
    return "undefined";
  }
  std::ostringstream out;
  out << tensor.scalar_type() << " sizes " << tensor.sizes() << " strides " << tensor.strides();
  if (tensor.is_conj()) out << " conjugate";
  if (tensor.is_neg()) out << " negative";
  if (tensor.requires_grad()) out << " requires_grad";
  return out.str();
}

// LibTorch keeps a saved tensor whole and asks it who made it after a write; where the tensor is gone, ebb knows only
// who had made it when it was saved. Both are right about the write.
std::string without_producer(const std::string& error) {
  static const std::regex producer(", which is output [0-9]+ of .*, is at version");
  return std::regex_replace(error, producer, " is at version");
}

// One of several views of one call (split, unbind), or a view made without gradients, whose base was then written:
// LibTorch refuses to name its maker before it gets to compare versions. Where the view is gone ebb has nothing to ask,
// and says what is as true of it.
// A region of the program's inside of a region of ebb's ends with the second run of ebb's, and refuses a second
// backward pass in its own words.
bool same_refusal(const std::string& expected, const std::string& found) {
  if (expected.find("Trying to backward through the graph a second time") != std::string::npos &&
      (found.find("a checkpointed tensor is asked for twice") != std::string::npos ||
       found.find("a hook of the program's is asked twice") != std::string::npos)) {
    return true;
  }
  const bool refused_to_name =
      expected.find("This view is the output of a function that returns multiple views") != std::string::npos ||
      expected.find("A view was created in no_grad mode and its base") != std::string::npos;
  return refused_to_name && found.find("has been modified by an inplace operation") != std::string::npos;
}

std::string first_other_byte(const std::string& expected, const std::string& found) {
  const auto [left, right] = std::ranges::mismatch(expected, found);
  std::ostringstream out;
  out << "bytes differ from byte " << left - expected.begin() << " of " << expected.size() << " on: 0x" << std::hex
      << static_cast<int>(static_cast<unsigned char>(*right)) << " instead of 0x"
      << static_cast<int>(static_cast<unsigned char>(*left));
  return out.str();
}

}  // namespace

Record::Record(int value, std::string what, const at::Tensor& tensor)
    : value_(value), what_(std::move(what)), form_(form_of(tensor)) {
  if (tensor.defined()) {
    const at::NoGradGuard no_grad;
    copy_ = tensor.detach().resolve_conj().resolve_neg().clone(at::MemoryFormat::Contiguous);
  }
}

Record::Record(int value, std::string error)
    : value_(value), what_("error"), content_(without_producer(std::move(error))) {}

void Record::settle() {
  if (copy_.defined()) {
    const at::Tensor on_host = copy_.cpu();
    content_.assign(static_cast<const char*>(on_host.const_data_ptr()), on_host.nbytes());
    copy_.reset();
  }
}

std::optional<std::string> Record::difference(const Record& found) const {
  if (name() != found.name()) {
    return found.name() + (found.is_error() ? " (" + found.text() + ")" : "") + " instead of " + name() +
           (is_error() ? " (" + text() + ")" : "");
  }
  if (is_error()) {
    return text() == found.text() || same_refusal(text(), found.text())
               ? std::nullopt
               : std::optional(name() + ": \"" + found.text() + "\" instead of \"" + text() + "\"");
  }
  if (form_ != found.form_) {
    return name() + ": " + found.form_ + " instead of " + form_;
  }
  if (content_ != found.content_) {
    return name() + " (" + form_ + "): " + first_other_byte(content_, found.content_);
  }
  return std::nullopt;
}

bool same_error(const std::string& expected, const std::string& found) {
  const std::string left = without_producer(expected);
  const std::string right = without_producer(found);
  return left == right || same_refusal(left, right);
}

std::optional<Difference> first_difference(const Outcome& expected, const Outcome& found) {
  for (std::size_t thread = 0; thread < expected.size(); ++thread) {
    const std::string where = "thread " + std::to_string(thread) + ", ";
    const std::size_t both = std::min(expected[thread].size(), found[thread].size());
    for (std::size_t i = 0; i < both; ++i) {
      if (const auto other = expected[thread][i].difference(found[thread][i])) {
        const Record& record = found[thread][i];
        return Difference{where + *other, thread, record.value(), record.is_error() ? record.text() : std::string()};
      }
    }
    if (expected[thread].size() != found[thread].size()) {
      const bool missing = both < expected[thread].size();
      const Record& record = (missing ? expected : found)[thread][both];
      return Difference{where + record.name() + (missing ? " is missing" : " is too much"), thread, record.value(), {}};
    }
  }
  return std::nullopt;
}

std::optional<std::string> difference(const Outcome& expected, const Outcome& found) {
  const std::optional<Difference> first = first_difference(expected, found);
  return first ? std::optional(first->text) : std::nullopt;
}

}  // namespace ebb::graphs

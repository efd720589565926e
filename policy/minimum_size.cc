#include "policy/minimum_size.h"

#include <stdexcept>
#include <string>
#include <utility>

namespace ebb {

MinimumSize::MinimumSize(std::uint64_t bytes, std::shared_ptr<Policy> inner)
    : Wrapper("minimum_size", std::move(inner)), bytes_(bytes) {
  constexpr std::uint64_t kLargestSize = std::uint64_t{1} << 56;
  if (bytes > kLargestSize) {  // a negative number arrives as almost 2^64, and would silently keep everything
    throw std::invalid_argument("minimum_size: " + std::to_string(static_cast<std::int64_t>(bytes)) +
                                " bytes is no size; it must be between 0 and 2^56");
  }
}

Decision MinimumSize::decide(const Candidate& candidate) {
  return candidate.bytes < bytes_ ? Decision::kKeep : inner().decide(candidate);
}

std::shared_ptr<Policy> minimum_size(std::uint64_t bytes, std::shared_ptr<Policy> inner) {
  return std::make_shared<MinimumSize>(bytes, std::move(inner));
}

}  // namespace ebb

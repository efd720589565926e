#include "policy/minimum_size.h"

#include <utility>

namespace ebb {

MinimumSize::MinimumSize(std::uint64_t bytes, std::shared_ptr<Policy> inner)
    : Wrapper("minimum_size", std::move(inner)), bytes_(bytes) {}

Decision MinimumSize::decide(const Candidate& candidate) {
  return candidate.bytes < bytes_ ? Decision::kKeep : inner().decide(candidate);
}

std::shared_ptr<Policy> minimum_size(std::uint64_t bytes, std::shared_ptr<Policy> inner) {
  return std::make_shared<MinimumSize>(bytes, std::move(inner));
}

}  // namespace ebb

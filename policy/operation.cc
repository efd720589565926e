#include "policy/operation.h"

#include <utility>

namespace ebb {

Operation::Operation(const char* factory, Listed listed, Names names, std::shared_ptr<Policy> inner)
    : Wrapper(factory, std::move(inner)), listed_(listed), names_(std::move(names)) {}

Decision Operation::decide(const Candidate& candidate) {
  const bool is_listed = count(names_.find(candidate.operation) != names_.end());
  return is_listed == (listed_ == Listed::kPass) ? inner().decide(candidate) : Decision::kKeep;
}

std::shared_ptr<Policy> only_operations(Operation::Names names, std::shared_ptr<Policy> inner) {
  return std::make_shared<Operation>("only_operations", Operation::Listed::kPass, std::move(names), std::move(inner));
}

std::shared_ptr<Policy> except_operations(Operation::Names names, std::shared_ptr<Policy> inner) {
  return std::make_shared<Operation>("except_operations", Operation::Listed::kKeep, std::move(names), std::move(inner));
}

}  // namespace ebb

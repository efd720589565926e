#include "policy/callback.h"

#include <stdexcept>
#include <utility>

namespace ebb {

Callback::Callback(Function function, std::shared_ptr<Policy> inner)
    : Wrapper("callback", std::move(inner)), function_(std::move(function)) {
  if (!function_) {
    throw std::invalid_argument("callback: the function is empty");
  }
}

Decision Callback::decide(const Candidate& candidate) {
  const Decision decision = function_(candidate);
  return decision == Decision::kOffload ? inner().decide(candidate) : decision;
}

std::shared_ptr<Policy> callback(Callback::Function function, std::shared_ptr<Policy> inner) {
  return std::make_shared<Callback>(std::move(function), std::move(inner));
}

}  // namespace ebb

#include "policy/wrapper.h"

#include <stdexcept>
#include <string>
#include <utility>

namespace ebb {

Wrapper::Wrapper(const char* name, std::shared_ptr<Policy> inner) : name_(name), inner_(std::move(inner)) {
  if (inner_ == nullptr) {
    throw std::invalid_argument(std::string(name) + ": the inner policy is null; offload_everything() is the plainest");
  }
}

std::vector<Matches> Wrapper::matches() const {
  std::vector<Matches> found = inner_->matches();
  if (asked_ > 0) {
    found.insert(found.begin(), {name_, asked_, matched_});
  }
  return found;
}

bool Wrapper::count(bool matched) {
  ++asked_;
  matched_ += matched ? 1 : 0;
  return matched;
}

}  // namespace ebb

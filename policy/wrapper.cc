#include "policy/wrapper.h"

#include <stdexcept>
#include <string>
#include <utility>

namespace ebb {

Wrapper::Wrapper(const char* name, std::shared_ptr<Policy> inner) : inner_(std::move(inner)) {
  if (inner_ == nullptr) {
    throw std::invalid_argument(std::string(name) + ": the inner policy is null; offload_everything() is the plainest");
  }
}

}  // namespace ebb

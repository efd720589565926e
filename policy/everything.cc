#include "policy/everything.h"

namespace ebb {

std::shared_ptr<Policy> offload_everything() { return std::make_shared<Everything>(); }

std::shared_ptr<Policy> keep_everything(std::uint64_t least_bytes) {
  return std::make_shared<KeepEverything>(least_bytes);
}

}  // namespace ebb

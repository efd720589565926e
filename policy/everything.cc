#include "policy/everything.h"

namespace ebb {

std::shared_ptr<Policy> offload_everything() { return std::make_shared<Everything>(); }

}  // namespace ebb

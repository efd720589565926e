#include "offload/backward.h"

#include <optional>

#include "offload/autograd/early_prefetch.h"
#include "offload/base/backward_pass.h"
#include "offload/tensors/lent_tensor.h"

namespace ebb {

struct Backward::Parts {
  const LendingPass lending;
  std::optional<EarlyPrefetch> early;
};

Backward::Backward() : parts_(std::make_unique<Parts>()) {
  if (!in_backward()) {
    parts_->early.emplace();
  }
}

Backward::~Backward() = default;

void Backward::fail() {
  if (parts_->early) {
    parts_->early->fail();
  }
}

}  // namespace ebb

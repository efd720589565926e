#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <set>
#include <string>

#include "policy/everything.h"
#include "policy/wrapper.h"

namespace ebb {

// Decides by the autograd node that made the tensor, named as `grad_fn->name()` names it ("SiluBackward0"). A tensor
// that no node made has the name "".
class Operation final : public Wrapper {
 public:
  using Names = std::set<std::string, std::less<>>;
  enum class Listed : std::uint8_t {
    kPass,  // storages of named operations go to the inner policy, the others are kept
    kKeep,  // storages of named operations are kept, the others go to the inner policy
  };

  Operation(const char* factory, Listed listed, Names names, std::shared_ptr<Policy> inner);
  [[nodiscard]] Decision decide(const Candidate& candidate) override;
  [[nodiscard]] bool needs_operation() const override { return true; }

 private:
  const Listed listed_;
  const Names names_;
};

// Keeps every storage that none of these operations made. Throws std::invalid_argument if `inner` is null.
[[nodiscard]] std::shared_ptr<Policy> only_operations(Operation::Names names,
                                                      std::shared_ptr<Policy> inner = offload_everything());

// Keeps every storage that one of these operations made. Throws std::invalid_argument if `inner` is null.
[[nodiscard]] std::shared_ptr<Policy> except_operations(Operation::Names names,
                                                        std::shared_ptr<Policy> inner = offload_everything());

}  // namespace ebb

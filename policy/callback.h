#pragma once

#include <functional>
#include <memory>

#include "policy/everything.h"
#include "policy/wrapper.h"

namespace ebb {

// What the user's function wants offloaded goes to the inner policy; what it keeps is kept, and what it recomputes is
// recomputed. The operation is filled in; what recomputing takes is if the inner policy needs it, as recompute() does.
//
// Threads, errors: as Policy. The function is called from any thread, never from two at once; what it throws reaches
// the forward pass.
class Callback final : public Wrapper {
 public:
  using Function = std::function<Decision(const Candidate&)>;

  Callback(Function function, std::shared_ptr<Policy> inner);
  [[nodiscard]] Decision decide(const Candidate& candidate) override;
  [[nodiscard]] bool needs_operation() const override { return true; }

 private:
  const Function function_;
};

// Throws std::invalid_argument if `function` is empty or `inner` is null.
[[nodiscard]] std::shared_ptr<Policy> callback(Callback::Function function,
                                               std::shared_ptr<Policy> inner = offload_everything());

}  // namespace ebb

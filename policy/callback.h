#pragma once

#include <functional>
#include <memory>

#include "policy/everything.h"
#include "policy/wrapper.h"

namespace ebb {

// Asks the user's function about each storage. A storage that the function wants offloaded goes to the inner policy;
// kKeep and kRecompute are the final decision. Candidate::operation is filled in for the function, and
// Candidate::recompute if the inner policy needs it, as recompute() does.
//
// Threads, errors: as Policy. The function is called from any thread, never from two at once; an exception of the
// function reaches the forward pass.
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

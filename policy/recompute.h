#pragma once

#include <memory>

#include "policy/everything.h"
#include "policy/wrapper.h"

namespace ebb {

// Drops every storage that can be recomputed at no more than a given cost.
class Recomputing final : public Wrapper {
 public:
  Recomputing(Recompute dearest, std::shared_ptr<Policy> inner);
  [[nodiscard]] Decision decide(const Candidate& candidate) override;
  [[nodiscard]] bool needs_recompute() const override { return true; }

 private:
  const Recompute dearest_;
};

// Storages whose Candidate::recompute is `dearest` or cheaper are recomputed; the others go to the inner policy. On an
// H200 in bfloat16, 1 GB costs 0.7 ms to recompute where it is memory-bound, 5 to 6 ms where it is compute-bound, and
// 18 ms to copy out and in, which may hide behind other work.
//
// Note [The graph is the recipe] in offload/recompute/graph_recipe.h says what recomputing requires of a program.
// Throws std::invalid_argument if `inner` is null.
[[nodiscard]] std::shared_ptr<Policy> recompute(Recompute dearest = Recompute::kMemoryBound,
                                                std::shared_ptr<Policy> inner = offload_everything());

}  // namespace ebb

#include "policy/recompute.h"

#include <utility>

namespace ebb {

Recomputing::Recomputing(Recompute dearest, std::shared_ptr<Policy> inner)
    : Wrapper("recompute", std::move(inner)), dearest_(dearest) {}

Decision Recomputing::decide(const Candidate& candidate) {
  const bool drops = candidate.recompute != Recompute::kNo && candidate.recompute <= dearest_;
  return count(drops) ? Decision::kRecompute : inner().decide(candidate);
}

std::shared_ptr<Policy> recompute(Recompute dearest, std::shared_ptr<Policy> inner) {
  return std::make_shared<Recomputing>(dearest, std::move(inner));
}

}  // namespace ebb

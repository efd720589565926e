#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "policy/everything.h"
#include "policy/wrapper.h"

namespace ebb {

// Keeps all but the biggest `fraction` of a step's storages, by count: with 0.2 and 50 storages the 10 biggest pass to
// the inner policy. "The biggest 20 %" is the example policy of Lightning thunder's CPU-offloading transform.
//
// Which storages are the biggest is known only at the end of a step, so the threshold size is learned from the last
// step that saved anything. Among storages of exactly the threshold size the first saved pass, until the count is
// reached. In the first step every storage passes. The count is rounded to the nearest whole number and is at least
// one. All storages that this policy is asked about are ranked, including those that the inner policy keeps.
class BiggestFraction final : public Wrapper {
 public:
  BiggestFraction(double fraction, std::shared_ptr<Policy> inner);
  void begin_step() override;
  void drop_step() override;
  [[nodiscard]] Decision decide(const Candidate& candidate) override;

 private:
  void learn();
  bool passes(std::uint64_t bytes);

  const double fraction_;
  std::vector<std::uint64_t> sizes_;   // bytes of each storage of this step
  std::uint64_t threshold_bytes_ = 0;  // bigger storages pass
  std::size_t passing_at_threshold_;   // how many storages of exactly this size pass in a step
  std::size_t left_at_threshold_;      // how many more of this size may pass in this step
};

// Throws std::invalid_argument if `fraction` is not in (0, 1] or `inner` is null.
[[nodiscard]] std::shared_ptr<Policy> biggest_fraction(double fraction,
                                                       std::shared_ptr<Policy> inner = offload_everything());

}  // namespace ebb

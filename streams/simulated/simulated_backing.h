#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <vector>

#include "streams/base/block_pool.h"

namespace ebb {

// Ordinary host memory for a pool, in which bytes that nobody uses any more are poisoned with 0xFF at once.
//
// Threads: as Backing.
class SimulatedBacking final : public Backing {
 public:
  std::optional<Range> grow(std::size_t bytes) override;
  void discard(Range range) noexcept override;

 private:
  struct Free {
    void operator()(void* memory) const noexcept;
  };

  std::vector<std::unique_ptr<void, Free>> slabs_;
};

}  // namespace ebb

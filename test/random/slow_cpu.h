#pragma once

#include <atomic>

namespace ebb::graphs {

// While an object of this class lives, nodes of the CPU in a GPU's graph wait before they run, in programs that are
// begun meanwhile; with `is_slow` only.
//
// Note [Sums of two threads]
// In a graph with nodes of a GPU and of the CPU, two threads of the engine run them side by side. Which of them adds
// first to a gradient that both add to is a matter of luck, and so are the last bits of a sum of three. Plain
// autograd shows that when one of the threads is late.
class SlowCpu {
 public:
  explicit SlowCpu(bool is_slow) { active = is_slow; }
  SlowCpu(const SlowCpu&) = delete;
  SlowCpu& operator=(const SlowCpu&) = delete;
  ~SlowCpu() { active = false; }

  static inline std::atomic<bool> active = false;
};

}  // namespace ebb::graphs

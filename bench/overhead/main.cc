// Question: what does one save cost the host on top of LibTorch's own work, passed through, moved and restored? Does
// that grow with what is alive? What does a save cost that was to move and finds no room? And what does a use of a
// managed storage cost, where a quarter of them fits on the device?
//
// A save is a torch::autograd::SavedVariable, made and unpacked as a node makes and unpacks it. Each row reports
// nanoseconds: a save's, a copy's, or, where it says so, a step's. Beside ebb's rows stand those of plain autograd and
// of hooks that autograd gets as it gets ebb's (default_hooks.h).
//
// Rows named "null_tier" are over a tier whose copies do nothing, so what is timed is ebb's own: hooks, policy, pool,
// order, statistics. What a user pays is in those named "pinned_tier", which move GPU memory to pinned host memory;
// they and "raw_copy" are left out where there is no GPU.

#include <iostream>

#include <benchmark/benchmark.h>
#include <c10/cuda/CUDAFunctions.h>

#include "bench/overhead/rows.h"

namespace ebb {

bool has_gpu() {
  static const bool found = c10::cuda::device_count() > 0;
  return found;
}

void skip_without_gpu(const std::string& row) { std::cerr << "overhead: " << row << " is left out: there is no GPU\n"; }

}  // namespace ebb

int main(int argc, char** argv) {
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) {
    return 1;
  }
  ebb::register_saves();
  ebb::register_chain();
  ebb::register_copies();
  ebb::register_live_graphs();
  ebb::register_no_room();
  ebb::register_managed();
  benchmark::RunSpecifiedBenchmarks();
  return 0;
}

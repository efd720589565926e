#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "offload/options.h"
#include "offload/plan_report.h"
#include "offload/stats.h"
#include "offload/timeline_sample.h"
#include "streams/base/trace_span.h"

namespace at {
class Tensor;
}

namespace ebb {

class Runtime;
class Tier;

// Owns what a training run needs to move saved activations away and back: the tier with its lanes and pool, the policy,
// the learned order of backward, the statistics. Make one, before the loop, and put OffloadGuards on it. Several may
// live at once. The first one made in a process installs an autograd engine that knows of guards; threads without a
// guard are not affected.
//
// Lifetime: graphs built under its guards keep what they need, so it may be destroyed before their backward.
// Threads: every member may be called from any thread; guards on several threads may share one offloader.
// Processes: in a forked child every member but the destructor throws c10::Error, and so do guards and the unpacking of
// what it moved. The child may make an offloader of its own.
class Offloader {
 public:
  // Throws std::invalid_argument for unusable options and c10::Error where the device or the spill file refuses.
  explicit Offloader(Options options = {});

  // Over a tier of the caller's (tests use a simulated one), which then decides device, capacity and kind of copies.
  Offloader(Options options, std::shared_ptr<Tier> tier);
  ~Offloader();
  Offloader(const Offloader&) = delete;
  Offloader& operator=(const Offloader&) = delete;

  // Never moves these tensors nor any view of their storages. Leaves that require gradients need no mention; this is
  // for buffers, frozen weights and the like. The tensors are not kept alive. Call it after the last `to(device)` or
  // `to(dtype)`: those give a module new storages. A module is a torch::nn::Module, or whatever else has parameters
  // and buffers.
  template <typename Module>
  requires requires(const Module& module) {
    module.parameters();
    module.buffers();
  }
  void exclude(const Module& module) {
    for (const at::Tensor& parameter : module.parameters()) {
      exclude(parameter);
    }
    for (const at::Tensor& buffer : module.buffers()) {
      exclude(buffer);
    }
  }
  void exclude(const at::Tensor& tensor);

  // Makes the streams that made them wait for all copies out, and lets their sources go. For measuring; training does
  // not need it.
  void drain();

  // Lets go of at least so much device memory if it can, as Options::evict_when_out_of_memory has it done for
  // LibTorch's allocator: for others, and for memory that is not LibTorch's. Without that option what the policy has
  // kept stays. Returns how many bytes of saved storages it was.
  std::uint64_t evict(std::uint64_t bytes);

  [[nodiscard]] Stats stats() const;

  // What came of it, in one line without its newline: the peak of saved tensors on the device beside what it would
  // have been, how much was moved and recomputed, and how long the device waited. Over the time that stats() is about.
  // The destructor logs it, if there were enough steps to tell (kEnoughSteps in summary.h). Without a budget it also
  // warns where moving has bought nothing, and of a policy that looked for a kind of storage and found none.
  [[nodiscard]] std::string summary() const;

  // With Options::device_budget, a table of the plan that was made or followed last: what becomes of the storages of
  // each operation and why, and the predicted peak and time beside the actual ones, once a step has been measured.
  [[nodiscard]] std::string explain() const;

  // The same in figures; nullopt where there is no plan yet.
  [[nodiscard]] std::optional<PlanReport> plan_report() const;

  // Sets all counts to zero and all peaks but the pool's to the present levels.
  void reset_stats();

  // The samples since the last call, if Options::record_timeline was set. At most one million are held.
  [[nodiscard]] std::vector<TimelineSample> take_timeline();

  // The spans since the last call, if Options::record_trace was set: what was over by now. At most one million are
  // held.
  [[nodiscard]] std::vector<TraceSpan> take_trace();

 private:
  friend class OffloadGuard;
  // Null if it is switched off.
  [[nodiscard]] const std::shared_ptr<Runtime>& runtime() const;

  std::shared_ptr<Runtime> runtime_;
};

}  // namespace ebb

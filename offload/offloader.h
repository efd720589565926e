#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "offload/options.h"
#include "offload/parameters.h"
#include "offload/plan_report.h"
#include "offload/stats.h"
#include "streams/base/trace_span.h"

namespace ebb {

class Runtime;
class Tier;

// Owns what a training run needs to offload saved activations and to fetch them. That is the tier with its lanes and
// pool, the policy, the access order of backward, and the statistics. Make an Offloader before the training loop, and
// put OffloadGuards on it. Several offloaders may live at once. The first Offloader of a process installs an autograd
// engine that knows of guards; threads without a guard are not affected.
//
// Lifetime: graphs built under an offloader's guards keep what they need, so the offloader may be destroyed before
// their backward.
// Threads: every member may be called from any thread; guards on several threads may share one offloader.
// Processes: in a forked child every member but the destructor throws c10::Error, and so do guards and the unpacking of
// what the offloader moved. The child may make an offloader of its own.
class Offloader {
 public:
  // Throws std::invalid_argument for unusable options and c10::Error where the device or the spill file refuses.
  explicit Offloader(Options options = {});

  // Uses a tier of the caller's, which then decides the device, the capacity and the kind of copies. (Tests use a
  // simulated tier.)
  Offloader(Options options, std::shared_ptr<Tier> tier);
  ~Offloader();
  Offloader(const Offloader&) = delete;
  Offloader& operator=(const Offloader&) = delete;

  // The device whose memory is spared. Throws c10::Error where that is a GPU that this machine does not have.
  [[nodiscard]] c10::Device device() const;

  // Has the offloader never move these tensors nor any other view of their storages. Leaves that require gradients are
  // never moved in any case; exclude is for buffers, frozen weights and the like. The tensors are not kept alive. Call
  // exclude after the last `to(device)` or `to(dtype)`, which give a module new storages. A module is a
  // torch::nn::Module, or anything else that has parameters and buffers.
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

  // Says that the program takes the memory of parameters away between their uses and fills memory again, as FSDP does.
  // Under a budget, what an operation computes from such a parameter then moves or stays, and is not recomputed. (A
  // policy that recomputes is the program's own choice: there, backward raises an error if the memory has gone.)
  void parameters_may_be_sharded();

  // Keeps the bytes of these tensors' storages in host memory, or without a GPU in the spill file. The device has the
  // bytes around their uses only, within Parameters::device_bytes. The tensors stay what they are. Every operation on
  // them or on their future views finds the bytes, in a step and elsewhere, and what an operation writes is kept. The
  // order of uses is learned, and what comes next is prefetched. Calls add up, and the first call's `how` holds.
  //
  // Gradients of managed leaves are managed in the same way, and so are the states of ebb's optimizers. States that
  // another optimizer makes by zeros_like are managed if an OptimizerStep lives (optimizer_step.h). Other states stay
  // on the device, unless they are given to manage once they are made.
  //
  // Call manage before forward: views and saves that exist already stay outside, and get c10::Error. So does whatever
  // asks for memory without an operation (data_ptr(), numpy(), torch::save of a module): save copies, as tensor.cpu()
  // or tensor.clone(). Operations that are not LibTorch's own (c10d) may write without saying so in their schemas. Such
  // a write counts if it is over when the operation returns, or on a CPU when a process group's work is over. Two
  // backward passes at once must not add to one managed leaf. Memory of another stream than the current stream is freed
  // behind the current stream, too.
  //
  // Parameters in CPU memory are first moved to the offloader's GPU, one after the other, and otherwise as Module::to
  // moves them. So a model may be larger than the GPU's memory. Buffers stay where they are.
  //
  // The tensors must be dense, and on the offloader's device or in CPU memory: otherwise throws std::invalid_argument.
  // Throws c10::Error where there is no room for their bytes. Also throws where another offloader manages a storage, or
  // has done so until that offloader's end. The tensors before that storage are then managed. What storages that have
  // ended have at home is let go of when an offloader is made or ends, or when stats() is called. An offloader that is
  // switched off moves parameters, too, and then has no effect. A module is a torch::nn::Module, or anything else that
  // has named_parameters().
  template <typename Module>
  requires requires(const Module& module) { module.named_parameters(); }
  void manage(const Module& module, const Parameters& how = {}) {
    std::vector<at::Tensor> chosen;
    for (const auto& each : module.named_parameters()) {
      if (how.which == nullptr || how.which(each.key(), each.value())) {
        chosen.push_back(each.value());
      }
    }
    manage(chosen, how);
  }
  void manage(const std::vector<at::Tensor>& tensors, const Parameters& how = {});

  // Undoes manage(): these tensors, their gradients and the states that optimizers have made of them are on the device
  // for good. Whoever asks for their memory finds it, and new gradients stay. Updates that were put off are done first.
  // Throws as operations on the tensors would. Some tensors are then released, and a second call goes on.
  template <typename Module>
  requires requires(const Module& module) { module.named_parameters(); }
  void release(const Module& module) { release(module.parameters()); }
  void release(const std::vector<at::Tensor>& tensors);

  // Makes the compute streams wait for all copies out of their memory, and lets go of the sources. Meant for measuring;
  // training does not need this call.
  void drain();

  // Frees at least `bytes` of device memory if it can, as Options::evict_when_out_of_memory describes for LibTorch's
  // allocator. Meant for memory needs that LibTorch's allocator does not see. Without that option storages that the
  // policy has kept stay. Returns how many bytes of saved and managed storages were let go.
  std::uint64_t evict(std::uint64_t bytes);

  [[nodiscard]] Stats stats() const;

  // One line, without a newline, about the time that stats() covers. The line has the peak of saved tensors on the
  // device beside the peak that keeping everything would have had. It says how much was moved and recomputed, and how
  // long the device waited. It also has the peak of managed tensors, and how many of their bytes were fetched, and
  // fetched late. The destructor logs this line if there were enough steps to tell (kEnoughSteps in summary.h). Without
  // a budget the destructor also warns where moving has gained nothing, and of a policy that matched no storage.
  [[nodiscard]] std::string summary() const;

  // With Options::device_budget, a table of the plan that was made or followed last. The table says what becomes of the
  // storages of each operation, and why. Once a step has been measured, the step's peak and time stand beside the
  // predicted peak and time.
  [[nodiscard]] std::string explain() const;

  // The plan of explain() in figures; nullopt where there is no plan yet.
  [[nodiscard]] std::optional<PlanReport> plan_report() const;

  // Sets all counts to zero and all peaks but the pool's to the present levels.
  void reset_stats();

  // The samples since the last call, if Options::record_timeline was set. At most one million are held.
  [[nodiscard]] std::vector<TimelineSample> take_timeline();

  // The spans that have ended since the last call, if Options::record_trace was set. At most one million are held.
  [[nodiscard]] std::vector<TraceSpan> take_trace();

 private:
  friend class OffloadGuard;
  // Null if the offloader is switched off.
  [[nodiscard]] const std::shared_ptr<Runtime>& runtime() const;

  std::optional<c10::Device> device_;  // nullopt: the current GPU, or the CPU without one
  std::shared_ptr<Runtime> runtime_;
};

}  // namespace ebb

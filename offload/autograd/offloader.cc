#include "offload/offloader.h"

#include <stdexcept>
#include <utility>

#include <ATen/Context.h>
#include <ATen/core/grad_mode.h>
#include <c10/cuda/CUDAFunctions.h>

#include "offload/accounts/summary.h"
#include "offload/autograd/engine.h"
#include "offload/base/gradient_hook.h"
#include "offload/base/log.h"
#include "offload/base/managed_key.h"
#include "offload/managed/manage.h"
#include "offload/managed/managed_gradients.h"
#include "offload/managed/observed_operations.h"
#include "offload/plans/plan_follower.h"
#include "offload/saving/out_of_memory.h"
#include "offload/saving/runtime.h"
#include "streams/base/process_mark.h"
#include "streams/base/trace.h"
#include "streams/disk/disk_tier.h"
#include "streams/disk/mmap_allocator.h"
#include "streams/disk/spill_file.h"
#include "streams/gpu/pinned_tier.h"

namespace ebb {
namespace {

c10::Device resolve(const std::optional<c10::Device>& device) {
  if (!device) {
    const bool gpu = c10::cuda::device_count() > 0;
    return gpu ? c10::Device(c10::kCUDA, c10::cuda::current_device()) : c10::Device(c10::kCPU);
  }
  if (!device->is_cuda()) {
    return *device;
  }
  TORCH_CHECK(c10::cuda::device_count() > 0, "ebb: Options::device is ", device->str(),
              ", but this machine has no CUDA device that can be used");
  TORCH_CHECK(device->index() < c10::cuda::device_count(), "ebb: Options::device is ", device->str(),
              ", but this machine has ", c10::cuda::device_count(), " CUDA devices");
  return device->has_index() ? *device : c10::Device(c10::kCUDA, c10::cuda::current_device());
}

std::shared_ptr<Tier> make_tier(const Options& options, const std::shared_ptr<Trace>& trace) {
  if (options.device->is_cuda()) {
    PinnedTier::Config config;
    config.device = *options.device;
    config.pinned = options.host_memory == HostMemory::kPinned;
    config.capacity_bytes = options.capacity_bytes;
    config.trace = trace;
    return std::make_shared<PinnedTier>(config);
  }
  auto file = options.home == Home::kHost ? SpillFile::in_memory() : std::make_unique<SpillFile>(options.spill_folder);
  auto tier = std::make_shared<DiskTier>(std::move(file), options.capacity_bytes, options.disk_io, trace);
  if (options.return_freed_memory) {
    MmapAllocator::install();
  }
  return tier;
}

std::shared_ptr<Trace> make_trace(const Options& options) {
  return options.record_trace ? std::make_shared<Trace>() : nullptr;
}

std::shared_ptr<Runtime> make_runtime(Options options, std::shared_ptr<Tier> tier, std::shared_ptr<Trace> trace) {
  if (tier->device().is_cuda()) {  // or LibTorch's allocator knows of no device before the program's first tensor there
    at::globalContext().lazyInitDevice(c10::kCUDA);
  }
  forget_ended_storages();  // of offloaders that have ended before their tensors: their homes are free for this one
  install_engine();
  keep_log_alive();
  auto runtime = make_shared_unless_forked<Runtime>(std::move(options), std::move(tier), std::move(trace));
  if (runtime->serves_allocator()) {
    serve_when_out_of_memory(runtime);
  }
  return runtime;
}

// As Module::to moves a parameter.
void move_from_cpu(const at::Tensor& tensor, c10::Device device) {
  if (!tensor.defined() || device.is_cpu() || !tensor.is_cpu()) {
    return;
  }
  const at::NoGradGuard no_grad;
  tensor.set_data(tensor.to(device));
  if (tensor.is_leaf() && tensor.grad().defined()) {
    tensor.mutable_grad() = tensor.grad().to(device);
  }
}

}  // namespace

Offloader::Offloader(Options options) {
  device_ = options.device;
  if (!options.enabled) {
    return;
  }
  device_ = options.device = resolve(options.device);
  validate(options);
  const std::shared_ptr<Trace> trace = make_trace(options);
  runtime_ = make_runtime(options, make_tier(options, trace), trace);
}

Offloader::Offloader(Options options, std::shared_ptr<Tier> tier) {
  if (tier == nullptr) {
    throw std::invalid_argument("ebb: Offloader needs a tier, and was given a null pointer");
  }
  device_ = tier->device();
  options.device = std::nullopt;  // and with it the spill folder: both are the tier's affair
  validate(options);
  if (options.enabled) {
    runtime_ = make_runtime(options, std::move(tier), make_trace(options));
  }
}

Offloader::~Offloader() {
  if (runtime_ == nullptr || runtime_->forked()) {
    return;
  }
  forget_ended_storages();
  if (runtime_->residency().ledger().counters().steps < kEnoughSteps) {
    return;
  }
  try {
    const Stats now = runtime_->stats();
    log_info(ebb::summary(now));
    for (const std::string& warning : runtime_->decider().warnings(now)) {
      log_warning(warning);
    }
  } catch (...) {  // no memory for the summary, or a logger that throws
  }
}

void Offloader::exclude(const at::Tensor& tensor) {
  if (const auto& runtime = this->runtime()) {
    runtime->exclusions().add(tensor);
  }
}

void Offloader::parameters_may_be_sharded() {
  const auto& runtime = this->runtime();
  if (runtime != nullptr && runtime->plans() != nullptr) {
    runtime->plans()->leaves().may_be();
  }
}

c10::Device Offloader::device() const { return resolve(device_); }

void Offloader::manage(const std::vector<at::Tensor>& tensors, const Parameters& how) {
  const auto& runtime = this->runtime();
  if (runtime == nullptr) {
    for (const at::Tensor& tensor : tensors) {
      move_from_cpu(tensor, device());
    }
    return;
  }
  if (runtime->serves_allocator()) {
    learn_request_sizes();  // managed storages fill the device, and leave no room for what nobody has told of
  }
  const std::shared_ptr<ManagedSet> set = runtime->managed(how);
  observe_operations();
  for (const at::Tensor& tensor : tensors) {
    move_from_cpu(tensor, device());
    if (how.weights) {
      ebb::manage(set, tensor);
      set->fit();
    } else {
      manage_around(set, tensor);
    }
    if (how.gradients && is_managed(tensor) && tensor.is_leaf()) {
      manage_gradients(set, tensor);
    }
  }
}

void Offloader::release(const std::vector<at::Tensor>& tensors) {
  const auto& runtime = this->runtime();
  const std::shared_ptr<ManagedSet> set = runtime == nullptr ? nullptr : runtime->managed();
  if (set == nullptr) {
    return;
  }
  std::vector<at::Tensor> all;
  for (const at::Tensor& tensor : tensors) {
    leave_gradients_alone(tensor, set.get());
    all.push_back(tensor);
    if (tensor.is_leaf() && tensor.grad().defined()) {
      all.push_back(tensor.grad());
    }
  }
  ebb::release(set, all);
}

void Offloader::drain() {
  if (const auto& runtime = this->runtime()) {
    runtime->residency().stash().drain();
    if (const std::shared_ptr<ManagedSet> set = runtime->managed()) {
      set->drain();
    }
  }
}

std::uint64_t Offloader::evict(std::uint64_t bytes) {
  const auto& runtime = this->runtime();
  return runtime == nullptr ? 0 : runtime->evict(bytes);
}

Stats Offloader::stats() const {
  const auto& runtime = this->runtime();
  if (runtime == nullptr) {
    return {};
  }
  forget_ended_storages();
  return runtime->stats();
}

std::string Offloader::summary() const {
  const auto& runtime = this->runtime();
  return runtime == nullptr ? "ebb is switched off" : ebb::summary(runtime->stats());
}

std::string Offloader::explain() const {
  const auto& runtime = this->runtime();
  if (runtime == nullptr) {
    return "no plan: ebb is switched off\n";
  }
  return runtime->plans() == nullptr ? "no plan: Options::device_budget is not set\n" : runtime->plans()->explain();
}

std::optional<PlanReport> Offloader::plan_report() const {
  const auto& runtime = this->runtime();
  return runtime == nullptr || runtime->plans() == nullptr ? std::nullopt : runtime->plans()->report();
}

void Offloader::reset_stats() {
  if (const auto& runtime = this->runtime()) {
    runtime->reset_stats();
  }
}

std::vector<TimelineSample> Offloader::take_timeline() {
  const auto& runtime = this->runtime();
  return runtime == nullptr ? std::vector<TimelineSample>{} : runtime->residency().ledger().account()->timeline.take();
}

std::vector<TraceSpan> Offloader::take_trace() {
  const auto& runtime = this->runtime();
  if (runtime == nullptr || runtime->residency().trace() == nullptr) {
    return {};
  }
  runtime->tier().update_trace();
  return runtime->residency().trace()->take();
}

const std::shared_ptr<Runtime>& Offloader::runtime() const {
  if (runtime_ != nullptr) {
    runtime_->check_process();
  }
  return runtime_;
}

}  // namespace ebb

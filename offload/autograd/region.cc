#include "offload/autograd/region.h"

#include <algorithm>
#include <exception>
#include <set>
#include <utility>

#include <ATen/SequenceNumber.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/Exception.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include "offload/autograd/default_hooks.h"
#include "offload/autograd/engine.h"
#include "offload/autograd/guard_scope.h"
#include "offload/autograd/region_in_step.h"
#include "offload/autograd/save_hook.h"
#include "offload/base/autograd_info.h"
#include "offload/base/interpreter.h"
#include "offload/base/libtorch.h"
#include "offload/checkpoint.h"
#include "offload/saving/runtime.h"

namespace ebb {
namespace {

constexpr const char* kWhat = "this checkpointed region";  // in errors

enum class Which : std::uint8_t { kFirstRun, kSecondRun, kOnlyRun };

// The entry that a run of a region puts on its thread's stack, which LibTorch hands on to engine threads (Note [The
// guard stack is LibTorch's] in guard_scope.h). An ended entry is passed over, because the stack may have been
// captured.
class Running final : public c10::DebugInfoBase {
 public:
  static constexpr std::string_view kName = "ebb::Running";
  static constexpr auto kKind = debug_info_kind(0xEC, &kName);

  Running(std::shared_ptr<Region> region, Which which) : region_(std::move(region)), which_(which), around_(top()) {}

  // The calling thread's innermost run that has not ended; null if there is none, or if Python's default hooks were set
  // inside of it.
  static Running* innermost() {
    Running* found = top();
    while (found != nullptr && found->ended_) {
      found = found->around_;
    }
    return found == nullptr || default_hooks_here() > found->default_hooks_around_ ? nullptr : found;
  }

  [[nodiscard]] const std::shared_ptr<Region>& region() const { return region_; }
  [[nodiscard]] Which which() const { return which_; }
  void end() { ended_ = true; }

 private:
  static Running* top() { return static_cast<Running*>(c10::ThreadLocalDebugInfo::get(kKind)); }

  const std::shared_ptr<Region> region_;
  const Which which_;
  const std::size_t default_hooks_around_ = default_hooks_here();
  Running* const around_;  // lives at least as long as this, from below on the stack
  std::atomic<bool> ended_{false};
};

class Run {
 public:
  Run(std::shared_ptr<Region> region, Which which)
      : below_(c10::ThreadLocalDebugInfo::current()), running_(std::make_shared<Running>(std::move(region), which)) {
    c10::ThreadLocalDebugInfo::_push(Running::kKind, running_);
    with_it_ = c10::ThreadLocalDebugInfo::current();
  }
  ~Run() {
    running_->end();
    if (c10::ThreadLocalDebugInfo::current() == with_it_) {  // else a guard that was entered in the run lies on top
      c10::ThreadLocalDebugInfo::_forceCurrentDebugInfo(below_);
    }
  }
  Run(const Run&) = delete;
  Run& operator=(const Run&) = delete;

 private:
  const std::shared_ptr<c10::ThreadLocalDebugInfo> below_;
  const std::shared_ptr<Running> running_;
  std::shared_ptr<c10::ThreadLocalDebugInfo> with_it_;
};

// The tensor, detached from its history unless it is a leaf: an operation that saves its own output would own itself
// for ever.
at::Tensor without_history(const at::Tensor& tensor) { return tensor.is_leaf() ? tensor : tensor.tensor_data(); }

[[noreturn]] void refuse_backward_inside() {
  TORCH_CHECK(false,
              "ebb::checkpoint: the function went backward over what it had computed itself, which a checkpointed "
              "region does not keep");
}

class FirstRunsSave final : public torch::autograd::SavedVariableHooks {
 public:
  explicit FirstRunsSave(std::shared_ptr<Region> region) : region_(std::move(region)) {}
  ~FirstRunsSave() override {
    if (version_) {
      region_->drop(place_);
    }
    version_.reset();
    sweep_lent_here(this);
  }

  void call_pack_hook(const at::Tensor& tensor) override {
    place_ = region_->add(tensor);
    const AutogradInfo info(tensor);
    handing_ = handing_of(info);
    version_.emplace(tensor, info);
  }

  at::Tensor call_unpack_hook() override {
    if (!region_->first_run_is_over()) {
      refuse_backward_inside();
    }
    const WithoutInterpreterLock without;  // Note [The interpreter's lock] in interpreter.h
    sweep_lent_behind();                   // before memory is asked for
    at::Tensor tensor = region_->take(place_);
    version_->check(tensor);
    if (handing_ == Handing::kItself) {
      refer_to_lent(tensor, {this, version_->weak()});
    }
    return handing_ == Handing::kItself ? tensor : lend(tensor, handing_, {this, version_->weak()});
  }

 private:
  const std::shared_ptr<Region> region_;
  std::size_t place_ = 0;
  Handing handing_ = Handing::kCopied;   // once packed
  std::optional<VersionCheck> version_;  // once packed
};

// Gives the tensor to the region and keeps nothing, because the function may have stored the second graph somewhere.
class SecondRunsSave final : public torch::autograd::SavedVariableHooks {
 public:
  explicit SecondRunsSave(std::shared_ptr<Region> region) : region_(std::move(region)) {}

  void call_pack_hook(const at::Tensor& tensor) override {
    const AutogradInfo info(tensor);
    const bool is_filled = info.requires_grad();  // computed before, or a leaf of the program's
    if (std::exchange(region_, nullptr)->collect(without_history(tensor), is_filled)) {
      leave_function();
    }
  }

  at::Tensor call_unpack_hook() override { refuse_backward_inside(); }

 private:
  std::shared_ptr<Region> region_;  // until packed
};

}  // namespace

Region::InputMemory::InputMemory(const at::Tensor& input)
    : input_(input.getIntrusivePtr()),
      storage_(input.has_storage() ? input.storage().getWeakStorageImpl()
                                   : WeakStorage(c10::intrusive_ptr<c10::StorageImpl>())) {}

bool Region::InputMemory::has_been_replaced() const {
  const auto input = input_.lock();
  if (!input || !input->has_storage()) {
    return false;
  }
  return input->unsafe_storage().unsafeGetStorageImpl() != storage_._unsafe_get_target();
}

Region::Region(CheckpointedFunction function, const std::vector<at::Tensor>& inputs, EarlyStop early_stop)
    : function_(std::move(function)), early_stop_(early_stop) {
  for (const at::Tensor& input : inputs) {
    inputs_.emplace_back(input, /*is_output=*/false);
    input_memory_.emplace_back(input);
    input_needs_gradient_.push_back(input.defined() && input.requires_grad());
    const auto is_same = [&](const at::Tensor& other) { return other.is_same(input); };
    same_input_.push_back(static_cast<std::size_t>(std::ranges::find_if(inputs, is_same) - inputs.begin()));
  }
}

Region::~Region() = default;

std::shared_ptr<Region> Region::make(CheckpointedFunction function, const std::vector<at::Tensor>& inputs,
                                     EarlyStop early_stop) {
  auto region = std::make_shared<Region>(std::move(function), inputs, early_stop);
  const GuardScope::Target target = GuardScope::current();
  if (target.runtime != nullptr && Running::innermost() == nullptr) {
    region->planned_ = RegionInStep::ask(target, inputs);
  }
  return region;
}

std::vector<at::Tensor> Region::run(const std::shared_ptr<Region>& region, const std::vector<at::Tensor>& inputs) {
  if (region->planned_ != nullptr && region->planned_->stays()) {
    const Run only(region, Which::kOnlyRun);
    return region->function_(inputs);
  }
  std::vector<at::Tensor> outputs;
  {
    const Run first(region, Which::kFirstRun);
    outputs = region->function_(inputs);
  }
  region->draws_ = !region->setting_.random_state_is_unchanged();
  region->first_run_is_over_ = true;
  return outputs;
}

std::unique_ptr<torch::autograd::SavedVariableHooks> Region::hook_here() {
  const Running* const running = Running::innermost();
  if (running == nullptr) {
    return nullptr;
  }
  switch (running->which()) {
    case Which::kFirstRun:
      return std::make_unique<FirstRunsSave>(running->region());
    case Which::kSecondRun:
      return std::make_unique<SecondRunsSave>(running->region());
    case Which::kOnlyRun:
      break;
  }
  GuardScope::Target target = GuardScope::current();  // the function may have entered guards
  if (target.runtime == nullptr) {
    return nullptr;
  }
  const RegionInStep& planned = *running->region()->planned_;
  return std::make_unique<SaveHook>(target, planned.is_of(*target.runtime) ? planned.saves() : nullptr);
}

std::size_t Region::add(const at::Tensor& saved) {
  const MutexLock lock(mutex_);
  saves_.push_back({saved.sizes().vec(), saved.scalar_type()});
  return saves_.size() - 1;
}

bool Region::collect(const at::Tensor& saved, bool is_filled) {
  std::optional<at::Tensor> earlier;  // of a second run before this; destroyed after the lock is released
  const MutexLock lock(mutex_);
  if (is_left_) {  // the function has caught what it was left by
    return false;
  }
  const std::uint64_t next_node = at::sequence_number::peek();
  operation_fills_ = (operation_fills_ && next_node == next_node_) || !is_filled;
  next_node_ = next_node;
  TORCH_CHECK(
      next_ < saves_.size() && saved.sizes() == saves_[next_].sizes && saved.scalar_type() == saves_[next_].dtype,
      "ebb::checkpoint: run again in backward, the function saved another tensor than the first time (number ",
      next_ + 1, " of ", saves_.size(), "): it must compute the same each time");
  if (saves_[next_].alive) {
    earlier = std::exchange(collected_[next_], saved);
    saves_[next_].second_version.emplace(saved, AutogradInfo(saved));
  }
  is_left_ = early_stop_ == EarlyStop::kYes && next_ >= last_alive_ && !operation_fills_;
  ++next_;
  return is_left_;
}

// The tensor that the last second run saved in this place, if the region or its last taker still has the tensor; else
// undefined.
at::Tensor Region::find(std::size_t place) {
  at::Tensor tensor;
  RememberedTensor taken;
  std::optional<VersionCheck> version;
  {
    process_.lock(mutex_, kWhat);
    const MutexLock lock(mutex_, std::adopt_lock);
    version = saves_[place].second_version;
    if (place < collected_.size() && collected_[place]) {
      tensor = *collected_[place];
      if (version->holds()) {
        collected_[place].reset();
        saves_[place].taken.remember(tensor);
      }
    } else {
      taken = saves_[place].taken;
    }
  }
  if (!tensor.defined()) {
    tensor = taken.recall();  // without the lock, as is check(): Note [The interpreter's lock]
  }
  if (tensor.defined()) {
    version->check(tensor);
  }
  return tensor;
}

at::Tensor Region::take(std::size_t place) {
  if (at::Tensor tensor = find(place); tensor.defined()) {
    return tensor;
  }
  if (planned_ != nullptr) {
    planned_->needed();
  }
  process_.lock(run_mutex_, kWhat);
  const MutexLock one_at_a_time(run_mutex_, std::adopt_lock);
  at::Tensor tensor = find(place);  // defined if another thread has run the function meanwhile
  if (!tensor.defined()) {
    run_again();
    tensor = find(place);
  }
  TORCH_CHECK(tensor.defined(),
              "ebb::checkpoint: run again in backward, the function saved fewer tensors than the first time: it "
              "must compute the same each time");
  return tensor;
}

void Region::drop(std::size_t place) {
  std::optional<at::Tensor> unwanted;  // destroyed after the lock is released
  if (!process_.forked()) {
    mutex_.lock();
  } else if (!mutex_.try_lock()) {  // no thread of a forked child would ever release the lock
    return;
  }
  const MutexLock lock(mutex_, std::adopt_lock);
  saves_[place].alive = false;
  saves_[place].taken = {};
  if (place < collected_.size()) {
    unwanted = std::exchange(collected_[place], std::nullopt);
  }
}

void Region::run_again() {
  std::optional<RegionInStep::SecondRun> planned;
  if (planned_ != nullptr) {
    planned.emplace(*planned_);
  }
  std::vector<at::Tensor> inputs;
  for (std::size_t i = 0; i < inputs_.size(); ++i) {
    TORCH_CHECK(!input_memory_[i].has_been_replaced(), "ebb::checkpoint: input ", i + 1,
                " has been given other data (set_data) or another storage since the "
                "function ran; the second run in backward would compute something else");
    if (same_input_[i] < i) {  // a function may ask whether two inputs are one tensor
      inputs.push_back(inputs[same_input_[i]]);
      continue;
    }
    const at::Tensor input = inputs_[i].unpack();
    inputs.push_back(input.defined() ? input.detach().requires_grad_(input_needs_gradient_[i]) : input);
  }
  {
    const MutexLock lock(mutex_);
    next_ = 0;
    is_left_ = operation_fills_ = false;
    collected_.resize(saves_.size());
    last_alive_ = saves_.size() - 1;
    while (last_alive_ > 0 && !saves_[last_alive_].alive) {
      --last_alive_;
    }
  }
  SettingInForce as_in_forward(setting_, draws_ ? Random::kToo : Random::kLeftAlone);
  const c10::InferenceMode no_inference(false);
  const at::AutoGradMode gradients(true);
  const Run second(shared_from_this(), Which::kSecondRun);
  const auto put_random_state_back_if_left = [&] {  // the function may not have put it back itself
    const MutexLock lock(mutex_);
    if (is_left_) {
      as_in_forward.put_random_state_back();
    }
  };
  try {
    static_cast<void>(function_(inputs));
  } catch (...) {
    put_random_state_back_if_left();
    if (!is_leaving(std::current_exception())) {
      throw;
    }
  }
  put_random_state_back_if_left();
  if (planned) {
    planned->saves(collected_bytes(inputs));
  }
}

// The bytes of the storages that the second run has saved, each counted once, without the inputs' storages and those
// that are never moved.
std::uint64_t Region::collected_bytes(const std::vector<at::Tensor>& inputs) {
  std::set<const c10::StorageImpl*> seen;
  for (const at::Tensor& input : inputs) {
    if (input.defined() && input.has_storage()) {
      seen.insert(input.storage().unsafeGetStorageImpl());
    }
  }
  std::uint64_t bytes = 0;
  const MutexLock lock(mutex_);
  for (const std::optional<at::Tensor>& each : collected_) {
    if (each && planned_->may_move(*each) && seen.insert(each->storage().unsafeGetStorageImpl()).second) {
      bytes += each->storage().nbytes();
    }
  }
  return bytes;
}

std::vector<at::Tensor> checkpoint(CheckpointedFunction function, const std::vector<at::Tensor>& inputs,
                                   EarlyStop early_stop) {
  if (!at::GradMode::is_enabled()) {  // nothing is saved
    return function(inputs);
  }
  install_engine();
  return Region::run(Region::make(std::move(function), inputs, early_stop), inputs);
}

}  // namespace ebb

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include <ATen/SequenceNumber.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>
#include <c10/util/ScopeExit.h>
#include <c10/util/hash.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/autograd/saved_variable_hooks.h>

#include "offload/autograd/engine.h"
#include "offload/autograd/guard_scope.h"
#include "offload/autograd/save_hook.h"
#include "offload/autograd/thread_setting.h"
#include "offload/base/autograd_info.h"
#include "offload/base/backward_pass.h"
#include "offload/base/interpreter.h"
#include "offload/base/log.h"
#include "offload/base/managed_key.h"
#include "offload/base/references.h"
#include "offload/base/version_id.h"
#include "offload/checkpoint.h"
#include "offload/recompute/log_recipe.h"
#include "offload/saving/runtime.h"
#include "offload/steps/saved_storage.h"
#include "offload/tensors/lent_tensor.h"
#include "offload/tensors/remembered_tensor.h"
#include "offload/tensors/version_check.h"
#include "streams/base/mutex.h"
#include "streams/base/process_mark.h"

namespace ebb {
namespace {

constexpr const char* kWhat = "this checkpointed region";  // in errors

// Whether the program has asked for a second run, or only allows one.
enum class Asked : bool { kNo, kYes };

// One call of checkpoint() or recomputable(): what its second run needs, and the second run's saves that nobody has
// taken yet.
//
// Note [Regions under a plan]
// Outside of other regions, under the guard of an offloader with a plan, the first run's saves are saved as any tensors
// are, and the plan decides about each of them. The region is a recipe for all of them, which makes them in one run.
// Elsewhere, hooks of the region's own keep nothing of what the first run saves.
//
// Ownership: the recipes, or the hooks, of the first run's saves own the region. So the region ends when backward is
// over, when the graph is dropped, or after the first run if nothing is to be made again. The region alone holds the
// saves of the second run, whose own graph is dropped at once.
//
// Threads: every member may be called from any thread.
class Region : public std::enable_shared_from_this<Region> {
 public:
  // Saves the inputs, as autograd would save them here. `planner`: of the plan that decides about the saves; null where
  // none does.
  Region(CheckpointedFunction function, const std::vector<at::Tensor>& inputs, EarlyStop early_stop,
         std::shared_ptr<Runtime> planner, Asked asked);

  // Runs the function in forward and returns its outputs.
  std::vector<at::Tensor> run(const std::vector<at::Tensor>& inputs);

  // Adds a save of the first run, and returns its place. `is_wanted`: the second run is to make it.
  std::size_t add(const at::Tensor& saved, bool is_wanted);

  // How what was saved lies in its storage.
  struct Layout {
    std::size_t bytes = 0;  // of the storage
    std::vector<std::int64_t> strides{};
    std::int64_t offset = 0;
    bool fills = false;  // all of the storage
    friend bool operator==(const Layout&, const Layout&) = default;
  };

  // How the second run makes the save in this place; null if too many recipes would have to run.
  [[nodiscard]] std::unique_ptr<Recipe> recipe(std::size_t place, const Layout& layout);
  [[nodiscard]] std::vector<const SavedStorage*> saved_inputs() const;
  [[nodiscard]] std::uint64_t number() const { return number_; }
  [[nodiscard]] bool is_asked_for() const { return asked_ == Asked::kYes; }

  // As Recipe::at_end.
  void at_end(std::function<void(bool may_run)> end);

  // Takes the next save of the second run. Returns true, at most once a run, if the function is to be left: with
  // EarlyStop::kYes, where nobody can ask for a later save, and the operation has filled what it saved (Note [Saved
  // before it is filled] in deferred_copies.h). `is_filled`: whether that is known of this save. Throws c10::Error if
  // the first run saved no tensor of these sizes and dtype in that place.
  [[nodiscard]] bool collect(const at::Tensor& saved, bool is_filled);

  // The tensor that the second run has saved in this place; the region then no longer holds the tensor. Runs the
  // function a second time first, unless the region holds the tensor already, or the last taker still has it. Throws
  // c10::Error if the second run saves other tensors than the first, before the first run is over, and in a child that
  // was forked meanwhile.
  [[nodiscard]] at::Tensor take(std::size_t place);

  // Says that nobody will ask for this place any more.
  void drop(std::size_t place);

 private:
  using WeakStorage = c10::weak_intrusive_ptr<c10::StorageImpl>;
  struct Input {
    torch::autograd::SavedVariable saved;
    at::Tensor kept;  // in its place: an inference tensor, which autograd does not save
    // The references are weak, and keep the addresses from being used again while this lives.
    WeakTensor tensor;
    WeakStorage storage;
    std::size_t same;  // the first input that is the same tensor
    bool needs_gradient;
  };
  struct Save {
    std::vector<std::int64_t> sizes;
    at::ScalarType dtype;
    bool alive = true;                                          // somebody may ask for it
    at::Tensor collected = {};                                  // the second run's tensor, until taken
    std::optional<c10::Stream> stream = std::nullopt;           // that made it
    std::optional<DeviceAccount::Held> held = std::nullopt;     // counts its bytes, under a plan
    RememberedTensor taken = {};                                // the same, once taken
    std::optional<VersionCheck> second_version = std::nullopt;  // of the second run's tensor, at its save
  };
  struct SecondRun {
    std::size_t last_alive = 0;    // when the run began
    std::size_t next = 0;          // place of the next save
    std::uint64_t next_node = 0;   // after the node of the last save
    bool operation_fills = false;  // whether the last save's operation may fill what it has saved
    bool is_left = false;
  };

  [[nodiscard]] static bool has_been_replaced(const Input& input);
  void end_first_run(bool may_run_again) noexcept;
  [[nodiscard]] std::vector<at::Tensor> unpack_inputs() EBB_REQUIRES(run_mutex_);
  [[nodiscard]] at::Tensor find(std::size_t place);
  void run_again() EBB_REQUIRES(run_mutex_);

  const ProcessMark process_;
  const CheckpointedFunction function_;
  const EarlyStop early_stop_;
  ThreadSetting setting_;  // of the first run; without the random state, from that run's end on, if it draws none
  std::vector<Input> inputs_;
  const std::shared_ptr<Runtime> planner_;                   // null without a plan
  std::vector<std::weak_ptr<SavedStorage>> saved_inputs_{};  // under a plan
  const Asked asked_;
  const std::uint64_t number_;  // of the process's regions, from 1
  static inline std::atomic<std::uint64_t> regions{0};
  std::vector<VersionCheck> versions_{};  // of the inputs, where no second run was asked for
  std::atomic<bool> first_run_is_over_{false};

  Mutex run_mutex_ EBB_ACQUIRED_BEFORE(mutex_);  // held over the function's second run
  Mutex mutex_;
  std::vector<Save> saves_ EBB_GUARDED_BY(mutex_);  // of the first run
  SecondRun second_ EBB_GUARDED_BY(mutex_);         // the last one
  std::optional<std::vector<std::function<void(bool)>>> at_end_ EBB_GUARDED_BY(mutex_){std::in_place};  // until then
};

using Hooks = torch::autograd::SavedVariableHooks;

class RegionRecipe final : public Recipe {
 public:
  RegionRecipe(std::shared_ptr<Region> region, std::size_t place, Region::Layout layout, int depth)
      : Recipe(depth), region_(std::move(region)), place_(place), layout_(std::move(layout)) {}
  ~RegionRecipe() override { region_->drop(place_); }

  [[nodiscard]] Recompute cost() const override { return Recompute::kComputeBound; }
  [[nodiscard]] std::vector<const SavedStorage*> inputs() const override { return region_->saved_inputs(); }
  [[nodiscard]] std::uint64_t identity() const override { return c10::get_hash(kWhat, place_); }
  [[nodiscard]] std::uint64_t run_of_several() const override { return region_->number(); }
  [[nodiscard]] bool is_given() const override { return region_->is_asked_for(); }

  bool at_end(std::function<void(bool may_run)> end) override {
    if (!is_given()) {
      region_->at_end(std::move(end));
    }
    return !is_given();
  }

 private:
  [[nodiscard]] c10::Storage make() override;

  const std::shared_ptr<Region> region_;
  const std::size_t place_;
  const Region::Layout layout_;
};

[[noreturn]] void refuse_backward_inside() {
  TORCH_CHECK(false,
              "ebb::checkpoint: the function went backward over what it had computed itself, which a checkpointed "
              "region does not keep");
}

class FirstRunsSave final : public Hooks {
 public:
  explicit FirstRunsSave(std::shared_ptr<Region> region) : region_(std::move(region)) {}
  ~FirstRunsSave() override {
    if (version_) {
      region_->drop(place_);
    }
    version_.reset();
    sweep_lent(this);
  }

  void call_pack_hook(const at::Tensor& tensor) override {
    place_ = region_->add(tensor, /*is_wanted=*/true);
    const AutogradInfo info(tensor);
    handing_ = handing_of(info);
    version_.emplace(tensor, info);
  }

  at::Tensor call_unpack_hook() override {
    const WithoutInterpreterLock without;  // Note [The interpreter's lock] in interpreter.h
    sweep_lent();                          // before memory is asked for
    at::Tensor tensor = region_->take(place_);
    version_->check(tensor);
    if (handing_ != Handing::kItself) {
      return lend(tensor, handing_, {this, version_->weak()});
    }
    refer_to_lent(tensor, {this, version_->weak()});
    return tensor;
  }

 private:
  const std::shared_ptr<Region> region_;
  std::size_t place_ = 0;
  Handing handing_ = Handing::kCopied;   // once packed
  std::optional<VersionCheck> version_;  // once packed
};

// Gives the tensor to the region and keeps nothing, because the function may have stored the second graph somewhere.
class SecondRunsSave final : public Hooks {
 public:
  explicit SecondRunsSave(std::shared_ptr<Region> region) : region_(std::move(region)) {}

  void call_pack_hook(const at::Tensor& tensor) override {
    const AutogradInfo info(tensor);
    const bool is_filled = info.requires_grad();  // computed before, or a leaf of the program's
    // Without history, unless it is a leaf: an operation that saves its own output would own itself for ever.
    const at::Tensor saved = info.is_leaf() ? tensor : tensor.tensor_data();
    if (std::exchange(region_, nullptr)->collect(saved, is_filled)) {
      leave_function();
    }
  }

  at::Tensor call_unpack_hook() override { refuse_backward_inside(); }

 private:
  std::shared_ptr<Region> region_;  // until packed
};

Region::Region(CheckpointedFunction function, const std::vector<at::Tensor>& inputs, EarlyStop early_stop,
               std::shared_ptr<Runtime> planner, Asked asked)
    : function_(std::move(function)),
      early_stop_(early_stop),
      planner_(std::move(planner)),
      asked_(asked),
      number_(++regions) {
  for (const at::Tensor& input : inputs) {
    const auto is_same = [&](const at::Tensor& other) { return other.is_same(input); };
    const bool is_saved = !input.defined() || !input.is_inference();
    inputs_.push_back({.saved = is_saved ? torch::autograd::SavedVariable(input, /*is_output=*/false)
                                         : torch::autograd::SavedVariable(),
                       .kept = is_saved ? at::Tensor() : input,
                       .tensor = WeakTensor(input.getIntrusivePtr()),
                       .storage = input.has_storage() ? input.storage().getWeakStorageImpl()
                                                      : WeakStorage(c10::intrusive_ptr<c10::StorageImpl>()),
                       .same = static_cast<std::size_t>(std::ranges::find_if(inputs, is_same) - inputs.begin()),
                       .needs_gradient = input.defined() && input.requires_grad()});
    if (is_saved && input.defined() && asked_ == Asked::kNo) {
      versions_.emplace_back(input, AutogradInfo(input));
    }
    if (planner_ != nullptr && is_saved && input.defined() && input.has_storage()) {
      const VersionId version(input.unsafeGetTensorImpl()->version_counter());
      if (const auto saved = planner_->steps().table().find(input.storage(), version)) {
        saved_inputs_.push_back(saved);
      }
    }
  }
}

Region::Layout layout_of(const at::Tensor& tensor) {
  if (!tensor.has_storage() || tensor.layout() != at::kStrided) {
    return {};
  }
  const std::size_t bytes = tensor.storage().nbytes();
  return {.bytes = bytes,
          .strides = tensor.strides().vec(),
          .offset = tensor.storage_offset(),
          .fills = tensor.is_non_overlapping_and_dense() && tensor.nbytes() == bytes};
}

// The storage is used as the first one was. So what lies otherwise in the second run, in a part of a cache, say, is
// copied.
c10::Storage RegionRecipe::make() {
  c10::Storage made;
  {
    const at::Tensor tensor = region_->take(place_);
    if (layout_of(tensor) != layout_) {
      TORCH_CHECK(layout_.fills,
                  "ebb::checkpoint: run again in backward, the function saved a tensor that lies otherwise "
                  "in its memory than the first time (number ",
                  place_ + 1, "): it must compute the same each time");
      return copy_of(tensor, layout_.strides);
    }
    made = tensor.storage();
  }
  return references_to(made) == 1 ? made : copy_of(made);  // the function may have kept it, or have saved it twice
}

c10::Stream current_stream_of(const at::Tensor& tensor) {
  return c10::impl::VirtualGuardImpl(tensor.device().type()).getStream(tensor.device());
}

// Whether the program still has the tensor, over another storage.
bool Region::has_been_replaced(const Input& input) {
  const auto tensor = input.tensor.lock();
  return tensor && tensor->has_storage() &&
         tensor->unsafe_storage().unsafeGetStorageImpl() != input.storage._unsafe_get_target();
}

std::vector<at::Tensor> Region::run(const std::vector<at::Tensor>& inputs) {
  std::vector<at::Tensor> outputs;
  auto failed = c10::make_scope_exit([this] { end_first_run(/*may_run_again=*/false); });
  {
    const auto first =
        GuardScope::enter(nullptr, [region = shared_from_this()](GuardScope::Target target) -> std::unique_ptr<Hooks> {
          if (region->planner_ == nullptr) {
            return std::make_unique<FirstRunsSave>(region);
          }
          const bool is_planned = target.runtime == region->planner_;  // or under a guard that the function enters
          return std::make_unique<SaveHook>(std::move(target), [region, is_planned](const at::Tensor& saved) {
            const std::size_t place = region->add(saved, /*is_wanted=*/false);
            return !is_planned ? MakeRecipe()
                               : [region, place, layout = layout_of(saved)] { return region->recipe(place, layout); };
          });
        });
    outputs = function_(inputs);
  }
  setting_.forget_unchanged_random_state();
  first_run_is_over_ = true;
  failed.release();
  end_first_run(std::ranges::all_of(versions_, &VersionCheck::holds));
  return outputs;
}

void Region::at_end(std::function<void(bool may_run)> end) {
  {
    const MutexLock lock(mutex_);
    if (at_end_) {
      at_end_->push_back(std::move(end));
      return;
    }
  }
  end(false);
}

void Region::end_first_run(bool may_run_again) noexcept {
  std::vector<std::function<void(bool)>> ends;
  {
    const MutexLock lock(mutex_);
    ends = std::move(*std::exchange(at_end_, std::nullopt));
  }
  for (const auto& end : ends) {
    try {
      end(may_run_again);
    } catch (...) {
      log_warning("what a checkpointed region has saved stays on the device");
    }
  }
}

std::size_t Region::add(const at::Tensor& saved, bool is_wanted) {
  const MutexLock lock(mutex_);
  saves_.push_back({.sizes = saved.sizes().vec(), .dtype = saved.scalar_type(), .alive = is_wanted});
  return saves_.size() - 1;
}

std::vector<const SavedStorage*> Region::saved_inputs() const {
  std::vector<const SavedStorage*> inputs;
  for (const auto& each : saved_inputs_) {
    if (const auto saved = each.lock()) {  // which the region's own save of the input keeps alive
      inputs.push_back(saved.get());
    }
  }
  return inputs;
}

std::unique_ptr<Recipe> Region::recipe(std::size_t place, const Layout& layout) {
  int depth = 0;
  for (const auto& each : saved_inputs_) {
    const auto saved = each.lock();
    depth = std::max(depth, saved == nullptr ? 0 : saved->recipe_depth());
  }
  if (depth + 1 > kMaxRecipeDepth) {
    return nullptr;
  }
  {
    const MutexLock lock(mutex_);
    saves_[place].alive = true;
  }
  return std::make_unique<RegionRecipe>(shared_from_this(), place, layout, depth + 1);
}

bool Region::collect(const at::Tensor& saved, bool is_filled) {
  at::Tensor earlier;  // of a second run before this; destroyed after the lock is released
  const MutexLock lock(mutex_);
  if (second_.is_left) {  // the function has caught what it was left by
    return false;
  }
  const std::uint64_t next_node = at::sequence_number::peek();
  second_.operation_fills = (second_.operation_fills && next_node == second_.next_node) || !is_filled;
  second_.next_node = next_node;
  const std::size_t place = second_.next;
  TORCH_CHECK(
      place < saves_.size() && saved.sizes() == saves_[place].sizes && saved.scalar_type() == saves_[place].dtype,
      "ebb::checkpoint: run again in backward, the function saved another tensor than the first time (number ",
      place + 1, " of ", saves_.size(), "): it must compute the same each time");
  if (Save& save = saves_[place]; save.alive) {
    earlier = std::exchange(save.collected, saved);
    save.second_version.emplace(saved, AutogradInfo(saved));
    save.stream = current_stream_of(saved);
    if (planner_ != nullptr) {
      save.held.emplace(
          planner_->residency().ledger().hold(saved.storage().nbytes(), DeviceAccount::Held::What::kRecomputed));
    }
  }
  second_.is_left = early_stop_ == EarlyStop::kYes && place >= second_.last_alive && !second_.operation_fills;
  ++second_.next;
  return second_.is_left;
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
    Save& save = saves_[place];
    version = save.second_version;
    tensor = save.collected;
    if (tensor.defined() && save.stream != current_stream_of(tensor)) {
      return {};  // nothing orders this stream's work behind the run's: the function runs here, too
    }
    if (!tensor.defined()) {
      taken = save.taken;
    } else if (version->holds()) {
      save.collected.reset();
      save.held.reset();
      save.taken.remember(tensor);
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
  if (!first_run_is_over_) {
    refuse_backward_inside();
  }
  if (at::Tensor tensor = find(place); tensor.defined()) {
    return tensor;
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
  at::Tensor unwanted;  // destroyed after the lock is released
  if (!process_.forked()) {
    mutex_.lock();
  } else if (!mutex_.try_lock()) {  // no thread of a forked child would ever release the lock
    return;
  }
  const MutexLock lock(mutex_, std::adopt_lock);
  saves_[place].alive = false;
  saves_[place].taken = {};
  saves_[place].held.reset();
  unwanted = std::exchange(saves_[place].collected, {});
}

std::vector<at::Tensor> Region::unpack_inputs() {
  std::vector<at::Tensor> inputs;
  for (const Input& input : inputs_) {
    const std::size_t place = inputs.size();
    TORCH_CHECK(!has_been_replaced(input), "ebb::checkpoint: input ", place + 1,
                " has been given other data (set_data) or another storage since the "
                "function ran; the second run in backward would compute something else");
    if (input.same < place) {  // a function may ask whether two inputs are one tensor
      inputs.push_back(inputs[input.same]);
      continue;
    }
    const at::Tensor tensor = input.kept.defined() ? input.kept : input.saved.unpack();
    inputs.push_back(tensor.defined() ? tensor.detach().requires_grad_(input.needs_gradient) : tensor);
  }
  return inputs;
}

void Region::run_again() {
  const std::vector<at::Tensor> inputs = unpack_inputs();
  {
    const MutexLock lock(mutex_);
    second_ = {.last_alive = saves_.size() - 1};
    while (second_.last_alive > 0 && !saves_[second_.last_alive].alive) {
      --second_.last_alive;
    }
  }
  SettingInForce as_in_forward(setting_);
  std::optional<c10::impl::IncludeDispatchKeyGuard> as_under_the_guard;  // what is compiled is compiled for the key
  if (planner_ != nullptr && planner_->decider().needs_recipes()) {
    as_under_the_guard.emplace(kManagedKey);
  }
  const c10::InferenceMode no_inference(false);
  const at::AutoGradMode gradients(true);
  const auto second = GuardScope::enter(
      nullptr, [region = shared_from_this()](const auto&) { return std::make_unique<SecondRunsSave>(region); });
  const auto put_random_state_back_if_left = [&] {  // the function may not have put it back itself
    const MutexLock lock(mutex_);
    if (second_.is_left) {
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
}

// The calling thread's place for a region: whether the plan of a guard's offloader would decide about the saves.
std::shared_ptr<Runtime> planner_here() {
  const GuardScope::Target target = GuardScope::current();
  const bool is_planned =
      target.runtime != nullptr && target.runtime->plans() != nullptr && target.run == nullptr && !in_backward();
  return is_planned ? target.runtime : nullptr;
}

}  // namespace

std::vector<at::Tensor> checkpoint(CheckpointedFunction function, const std::vector<at::Tensor>& inputs,
                                   EarlyStop early_stop) {
  if (!at::GradMode::is_enabled()) {  // nothing is saved
    return function(inputs);
  }
  install_engine();
  return std::make_shared<Region>(std::move(function), inputs, early_stop, planner_here(), Asked::kYes)->run(inputs);
}

std::vector<at::Tensor> recomputable(CheckpointedFunction function, const std::vector<at::Tensor>& inputs) {
  std::shared_ptr<Runtime> planner = at::GradMode::is_enabled() ? planner_here() : nullptr;
  if (planner == nullptr) {
    return function(inputs);
  }
  install_engine();
  return std::make_shared<Region>(std::move(function), inputs, EarlyStop::kNo, std::move(planner), Asked::kNo)
      ->run(inputs);
}

}  // namespace ebb

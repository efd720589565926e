#include "offload/recompute/log_recipe.h"

#include <algorithm>
#include <mutex>
#include <utility>

#include <ATen/Context.h>
#include <ATen/core/grad_mode.h>
#include <ATen/core/jit_type.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/equal.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/SmallVector.h>
#include <c10/util/hash.h>

#include "offload/base/libtorch_members.h"
#include "offload/base/log.h"
#include "offload/base/managed_key.h"

namespace ebb {
namespace {

using Argument = LoggedOperation::TensorArgument;

constexpr std::size_t kMostSteps = 48;                     // operations of a recipe
constexpr std::size_t kSmallBytes = std::size_t{1} << 16;  // of a value that may be copied
constexpr std::size_t kLeastSaving = 8;  // the bytes are at least so many times those that are copied for them

constexpr const char* kOther =
    "ebb: operations that were run again made tensors of other sizes: kernels or settings are others than they were in "
    "the forward pass";

at::Tensor all_bytes(const c10::Storage& storage, c10::Device device) {
  at::Tensor bytes = at::empty({0}, at::TensorOptions().dtype(at::kByte).device(device));
  bytes.unsafeGetTensorImpl()->set_storage_keep_dtype(storage);
  bytes.unsafeGetTensorImpl()->set_sizes_contiguous({static_cast<std::int64_t>(storage.nbytes())});
  return bytes;
}

c10::Storage empty_storage(std::size_t bytes, c10::Device device) {
  return at::empty({static_cast<std::int64_t>(bytes)}, at::TensorOptions().dtype(at::kByte).device(device)).storage();
}

c10::Storage copied(const c10::Storage& storage, c10::Device device) {
  const at::Tensor copy =
      at::empty({static_cast<std::int64_t>(storage.nbytes())}, at::TensorOptions().dtype(at::kByte).device(device));
  all_bytes(copy.storage(), device).copy_(all_bytes(storage, device));
  return copy.storage();
}

// The tensor that an operation took, over these bytes.
at::Tensor tensor_over(const c10::Storage& storage, const Argument& like) {
  const auto key = c10::computeDispatchKey(like.dtype, at::kStrided, like.device);
  auto impl = c10::make_intrusive<c10::TensorImpl>(c10::Storage(storage), c10::DispatchKeySet(key),
                                                   c10::scalarTypeToTypeMeta(like.dtype));
  impl->set_sizes_and_strides(like.sizes, like.strides, like.offset);
  at::Tensor tensor(std::move(impl));
  if (like.is_managed) {
    key_set_of(tensor) = tensor.key_set().add(kManagedKey);
  }
  return tensor;
}

// Below autograd, autocast and whatever else sees a program's operations.
class Below {
 private:
  const OperationLog::Unseen unseen_operations_;
  const at::AutoDispatchBelowADInplaceOrView no_autograd_;
  const at::NoGradGuard no_grad_;
  const c10::impl::ExcludeDispatchKeyGuard unseen_{
      c10::autocast_dispatch_keyset |
      c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot,
                           c10::DispatchKey::FuncTorchDynamicLayerFrontMode,
                           c10::DispatchKey::FuncTorchDynamicLayerBackMode, c10::DispatchKey::Functionalize,
                           c10::DispatchKey::FuncTorchVmapMode, c10::DispatchKey::VmapMode})};
};

// A generator in the state that an operation found it in, as long as this lives.
class RandomState {
 public:
  explicit RandomState(const LoggedOperation& operation) {
    if (operation.random_state.empty()) {
      return;
    }
    const auto on_gpu = std::ranges::find_if(operation.tensors, [](const auto& each) { return each.device.is_cuda(); });
    generator_ = at::globalContext().defaultGenerator(on_gpu == operation.tensors.end() ? c10::Device(c10::kCPU)
                                                                                        : on_gpu->device);
    alone_ = std::unique_lock(replaying_);
    const std::lock_guard lock(generator_.mutex());
    before_ = generator_.get_state();
    at::Tensor state = before_.clone();
    std::ranges::copy(operation.random_state, state.mutable_data_ptr<std::uint8_t>());
    generator_.set_state(state);
  }
  ~RandomState() {
    if (before_.defined()) {
      try {
        const std::lock_guard lock(generator_.mutex());
        generator_.set_state(before_);
      } catch (const std::exception&) {
        log_warning("the state of a random number generator could not be put back after a recomputation");
      }
    }
  }
  RandomState(const RandomState&) = delete;
  RandomState& operator=(const RandomState&) = delete;

 private:
  // Two recipes must not draw at once: each puts back the state that it found.
  static inline std::mutex replaying_;

  std::unique_lock<std::mutex> alone_;
  at::Generator generator_;
  at::Tensor before_;
};

c10::IValue list_of(const std::vector<at::Tensor>& tensors, const c10::Type& type) {
  const auto* const list = type.castRaw<c10::ListType>();
  if (list != nullptr && list->getElementType()->kind() == c10::TypeKind::OptionalType) {
    c10::List<std::optional<at::Tensor>> made;
    for (const at::Tensor& each : tensors) {
      made.push_back(each.defined() ? std::optional(each) : std::nullopt);
    }
    return made;
  }
  return c10::List<at::Tensor>(tensors);
}

}  // namespace

class LogRecipe::Search {
 public:
  Search(const OperationLog& log, const c10::Storage& target, std::optional<std::size_t> least_bytes)
      : log_(log),
        target_(target.unsafeGetStorageImpl()),
        target_bytes_(target.nbytes()),
        device_(target.device()),
        least_bytes_(least_bytes),
        small_bytes_(std::min(kSmallBytes, target.nbytes() / kLeastSaving)) {}

  // Whether the value can be made, beginning from others. `by_arithmetic`: also by operations that are bound by it.
  bool make(ValueId id, bool by_arithmetic = true) {
    const OperationLog::Value* const value = log_.value(id);
    const auto maker = value == nullptr ? nullptr : log_.operation(value->maker);
    if (maker == nullptr || operations_.size() >= kMostSteps || (maker->traits.is_compute_bound && !by_arithmetic)) {
      return false;
    }
    const LoggedOperation& operation = *maker;
    const c10::Stream stream = operation.stream;
    if (stream.device().is_cuda() &&
        stream != c10::impl::VirtualGuardImpl(stream.device_type()).getStream(stream.device())) {
      return false;
    }
    const auto are_statistics = [&](const Argument& each) {  // which take what they were before
      return each.after == id && each.is_filled_anew && operation.traits.statistics != 0;
    };
    if (std::ranges::any_of(operation.tensors, are_statistics)) {
      return false;
    }
    visited_.push_back(id);
    if (std::ranges::find(operations_, value->maker) != operations_.end()) {
      return true;
    }
    operations_.push_back(value->maker);
    return std::ranges::all_of(operation.tensors, [&](const Argument& each) {
      return each.value == kNoValue || each.is_filled_anew || have(each, by_arithmetic);
    });
  }

  [[nodiscard]] std::unique_ptr<LogRecipe> recipe_of(ValueId result) {
    if (!make(result)) {
      return nullptr;
    }
    int depth = 0;
    std::size_t copied_bytes = 0;
    for (const auto& root : roots_) {
      depth = std::max(depth, root->use ? root->use->storage()->recipe_depth() : 0);
      copied_bytes += root->save == nullptr && !root->version ? root->storage.nbytes() : 0;
    }
    if (copied_bytes > target_bytes_ / kLeastSaving) {
      return nullptr;
    }
    std::unique_ptr<LogRecipe> found(new LogRecipe(depth + 1));
    found->result_ = result;
    found->device_ = device_;
    found->bytes_ = target_bytes_;
    const auto mix = [&](std::size_t what) { found->identity_ = c10::hash_combine(found->identity_, what); };
    c10::SmallVector<ValueId, 2 * kMostSteps> seen;  // in the order of their first appearance; few
    const auto place_of = [&](ValueId value) {
      const auto place = static_cast<std::size_t>(std::ranges::find(seen, value) - seen.begin());
      if (place == seen.size()) {
        seen.push_back(value);
      }
      return place;
    };
    for (const auto& root : roots_) {
      place_of(root->value);
    }
    std::ranges::sort(operations_);
    for (const std::uint64_t place : operations_) {
      const auto operation = log_.operation(place);
      found->cost_ = operation->traits.is_compute_bound ? Recompute::kComputeBound : found->cost_;
      mix(std::hash<c10::OperatorHandle>()(operation->operation));
      for (const Argument& each : operation->tensors) {
        mix(static_cast<std::size_t>(each.dtype));
        mix(place_of(each.value));
      }
      for (const ValueId made : operation->made) {
        place_of(made);
      }
      found->operations_.push_back(operation);
    }
    mix(place_of(result));
    found->roots_ = std::move(roots_);
    return found;
  }

 private:
  // Whether the value is there, or can be made. Nothing is made again behind a tensor without a gradient: what that was
  // computed from may be written to, because the graph does not lead there.
  bool have(const Argument& argument, bool by_arithmetic) {
    const ValueId id = argument.value;
    if (std::ranges::find(visited_, id) != visited_.end() || begin_from(id, root_of(argument))) {
      return true;
    }
    if (!argument.requires_grad) {
      return false;
    }
    const std::size_t visited = visited_.size();
    const std::size_t operations = operations_.size();
    const std::size_t roots = roots_.size();
    if (make(id, /*by_arithmetic=*/false)) {
      return true;
    }
    visited_.resize(visited);
    operations_.resize(operations);
    roots_.resize(roots);
    return begin_from(id, unsaved_root_of(argument)) || (by_arithmetic && make(id));
  }

  bool begin_from(ValueId id, std::unique_ptr<Root> root) {
    if (root == nullptr) {
      return false;
    }
    roots_.push_back(std::move(root));
    visited_.push_back(id);
    return true;
  }

  // The storage that has the value, unless ebb alone still holds it: that depends on decisions, and steps that differ
  // in their recipes follow no plan.
  static c10::intrusive_ptr<c10::StorageImpl> held_by_program(const OperationLog::Value& value) {
    const OperationLog::Value::Asked* const asked = value.asked();
    const auto saved = asked != nullptr ? asked->saved.lock() : nullptr;
    return saved == nullptr || saved->is_held_by_program() ? value.storage.lock() : nullptr;
  }

  // Of Note [Values that nobody saves].
  [[nodiscard]] std::unique_ptr<Root> unsaved_root_of(const Argument& argument) const {
    const OperationLog::Value* const value = log_.value(argument.value);
    const bool may_be = least_bytes_ && value != nullptr && value->bytes >= *least_bytes_ &&
                        value->bytes <= target_bytes_ && argument.device == device_ && !argument.is_of_leaf &&
                        !argument.is_managed && log_.is_current(argument.value) && value->save.expired();
    auto alive = may_be ? held_by_program(*value) : nullptr;
    if (!alive || alive.get() == target_ || alive->nbytes() != value->bytes ||
        alive->data_ptr().get_context() == nullptr) {  // memory that LibTorch does not own
      return nullptr;
    }
    return std::unique_ptr<Root>(new Root{.value = argument.value,
                                          .like = argument,
                                          .save = nullptr,
                                          .use = {},
                                          .storage = c10::Storage(std::move(alive)),
                                          .version = value->counter,
                                          .version_was = value->version});
  }

  [[nodiscard]] std::unique_ptr<Root> root_of(const Argument& argument) const {
    const OperationLog::Value* const value = log_.value(argument.value);
    if (value == nullptr) {
      return nullptr;
    }
    const auto new_root = [&](auto save) {
      return std::unique_ptr<Root>(new Root{
          .value = argument.value, .like = argument, .save = std::move(save), .use = {}, .storage = {}, .version = {}});
    };
    std::shared_ptr<const OperationLog::Save> save = value->save.lock();
    save = save != nullptr && save->version.holds() ? save : nullptr;
    if (std::shared_ptr<SavedStorage> saved = save == nullptr ? nullptr : save->storage.lock()) {
      const bool is_target = saved->source().identity() == target_;  // in another version
      // A region's save is no place to begin from: with the save the region's whole second run would come.
      if (!is_target && !saved->is_of_region() && !saved->residency()->forked() && !saved->source_has_changed()) {
        auto of_saved = new_root(std::move(save));
        of_saved->use.emplace(std::move(saved));
        return of_saved;
      }
      save = nullptr;
    }
    const bool may_be_copied = value->bytes <= small_bytes_ && !argument.is_managed;
    const bool may_be_held = may_be_copied || (save != nullptr && save->passes_through);
    auto alive = may_be_held && log_.is_current(argument.value) ? held_by_program(*value) : nullptr;
    if (!alive || alive->nbytes() != value->bytes) {
      return nullptr;
    }
    c10::Storage storage(std::move(alive));
    const bool passes_through =
        save != nullptr && save->passes_through && (argument.is_managed || storage.data() == save->data);
    if (!passes_through && !may_be_copied) {
      return nullptr;
    }
    auto of_held = new_root(passes_through ? std::move(save) : nullptr);
    of_held->storage = std::move(storage);
    return of_held;
  }

  const OperationLog& log_;
  const c10::StorageImpl* const target_;
  const std::size_t target_bytes_;
  const c10::Device device_;
  const std::optional<std::size_t> least_bytes_;
  const std::size_t small_bytes_;  // of a value that may be copied
  // Few, and what a try has added is taken back from the end.
  std::vector<ValueId> visited_;
  std::vector<std::uint64_t> operations_;  // by place, which is their order
  std::vector<std::unique_ptr<Root>> roots_;
};

// Whether the operation has made others, too. Without a gradient of its own, such a value (a mask, an index) is saved
// for theirs, and the graph leads to what it was made from.
static bool is_made_with_others(const OperationLog& log, ValueId id) {
  const OperationLog::Value* const value = log.value(id);
  const auto maker = value == nullptr ? nullptr : log.operation(value->maker);
  return maker != nullptr && maker->made.size() > 1;
}

std::unique_ptr<LogRecipe> LogRecipe::find(const OperationLog& log, const at::Tensor& tensor,
                                           std::optional<std::size_t> least_bytes) {
  const ValueId id = log.value_of(tensor);
  if (id == kNoValue || is_customs(tensor) || !(tensor.requires_grad() || is_made_with_others(log, id))) {
    return nullptr;
  }
  return Search(log, tensor.storage(), least_bytes).recipe_of(id);
}

std::unique_ptr<LogRecipe> LogRecipe::find(const OperationLog& log, const Root& root, std::size_t least_bytes) {
  return root.like.requires_grad ? Search(log, root.storage, least_bytes).recipe_of(root.value) : nullptr;
}

void LogRecipe::save_values(std::uint64_t proof, const SaveValue& save) {
  std::uint64_t place = proof;
  for (const auto& root : roots_) {
    if (root->version) {
      SavedValue saved = save(*root, ++place);
      run_inside_of(saved.depth);
      root->use.emplace(std::move(saved.storage));
      root->storage = {};
    }
  }
}

bool LogRecipe::is_safe() const {
  return std::ranges::none_of(
      roots_, [](const auto& root) { return root->version && root->use->storage()->is_held_by_program(); });
}

c10::Storage copy_of(const c10::Storage& storage) {
  const Below below;
  return copied(storage, storage.device());
}

c10::Storage copy_of(const at::Tensor& tensor, c10::IntArrayRef strides) {
  const Below below;
  return at::empty_strided(tensor.sizes(), strides, tensor.options()).copy_(tensor).storage();
}

bool same_bytes(const c10::Storage& one, const c10::Storage& other) {
  const Below below;
  return at::equal(all_bytes(one, one.device()), all_bytes(other, other.device()));
}

std::vector<const SavedStorage*> LogRecipe::inputs() const {
  std::vector<const SavedStorage*> inputs;
  for (const auto& root : roots_) {
    if (root->use) {
      inputs.push_back(root->use->storage().get());
    }
  }
  return inputs;
}

void LogRecipe::settle() {
  const Below below;
  for (const auto& root : roots_) {
    if (root->save == nullptr && !root->version) {
      root->storage = copied(root->storage, root->like.device);
    }
  }
}

void LogRecipe::check(const Root& root) {
  if (root.version) {
    TORCH_CHECK(
        root.use->storage()->source().has_parted() || root.version->current_version() == root.version_was,
        "one of the variables needed for gradient computation has been modified by an inplace operation: what a "
        "saved tensor is recomputed from is at version ",
        root.version->current_version(), "; expected version ", root.version_was, " instead.");
  } else if (root.save == nullptr) {
    return;
  } else if (!root.save->version.holds()) {
    const c10::Storage none(c10::Storage::use_byte_size_t(), 0, c10::DataPtr(nullptr, root.like.device));
    root.save->version.check(tensor_over(none, root.like));
  }
  TORCH_CHECK(root.use ? !root.use->storage()->source_has_changed()
                       : root.like.is_managed ||
                             (root.storage.data() == root.save->data && root.storage.nbytes() == root.like.bytes),
              "ebb: a saved tensor is to be recomputed, but the memory of a tensor that it was computed from has been "
              "resized or replaced since. Have the policy keep or offload what is computed from such tensors.");
}

LogRecipe::Bytes LogRecipe::begin() const {
  Bytes have;
  for (const auto& root : roots_) {
    check(*root);
    have.emplace(root->value, root->use ? root->use->get() : root->storage);
  }
  return have;
}

c10::Storage LogRecipe::make() {
  Bytes have = begin();
  const Below below;
  return run_on(std::move(have));
}

c10::Storage LogRecipe::run_on(Bytes have) const {
  std::map<ValueId, std::size_t> last_use;
  for (std::size_t i = 0; i < operations_.size(); ++i) {
    for (const Argument& each : operations_[i]->tensors) {
      last_use[each.value] = i;
    }
  }
  for (std::size_t i = 0; i < operations_.size(); ++i) {
    const LoggedOperation& operation = *operations_[i];
    torch::jit::Stack stack;
    const auto is_root = [&](ValueId value) {
      return std::ranges::any_of(roots_, [&](const auto& root) { return root->value == value; });
    };
    for (const Argument& each : operation.tensors) {
      if (each.after != kNoValue && !have.contains(each.after)) {
        const bool is_over = last_use[each.value] == i && !is_root(each.value) && each.value != result_;
        have[each.after] = each.is_filled_anew ? empty_storage(each.bytes, each.device)
                           : is_over           ? have.at(each.value)
                                               : copied(have.at(each.value), each.device);
      }
    }
    const auto tensor_of = [&](const Argument& each) {
      if (each.value == kNoValue) {
        return at::Tensor();
      }
      const c10::Storage& storage = have.at(each.after != kNoValue ? each.after : each.value);
      TORCH_CHECK(storage.nbytes() >= each.bytes, kOther);
      return tensor_over(storage, each);
    };
    std::size_t next = 0;
    const auto& arguments = operation.operation.schema().arguments();
    for (std::size_t k = 0; k < operation.arguments.size(); ++k) {
      const std::uint32_t count = operation.tensors_in[k];
      if (count == LoggedOperation::kNoTensors) {
        stack.push_back(operation.arguments[k]);
        continue;
      }
      const auto& type = arguments[k].type();
      const bool is_list = type->kind() == c10::TypeKind::ListType ||
                           (type->kind() == c10::TypeKind::OptionalType &&
                            type->expectRef<c10::OptionalType>().getElementType()->kind() == c10::TypeKind::ListType);
      if (!is_list) {
        stack.emplace_back(tensor_of(operation.tensors[next++]));
        continue;
      }
      std::vector<at::Tensor> list;
      for (std::uint32_t n = 0; n < count; ++n) {
        list.push_back(tensor_of(operation.tensors[next++]));
      }
      stack.push_back(list_of(list, *type));
    }
    {
      const RandomState as_in_forward(operation);
      operation.operation.callBoxed(stack);
    }
    std::size_t place = 0;
    const auto take = [&](const at::Tensor& made) {
      const ValueId value = place < operation.made.size() ? operation.made[place] : kNoValue;
      if (value == result_ || last_use.contains(value)) {
        have[value] = made.storage();
      }
      ++place;
    };
    for (const c10::IValue& returned : stack) {
      if (returned.isTensor()) {
        take(returned.toTensor());
      } else if (returned.isList()) {
        for (const c10::IValue& each : returned.toListRef()) {
          if (each.isTensor()) {
            take(each.toTensor());
          }
        }
      }
    }
    for (const Argument& each : operation.tensors) {
      if (each.value != kNoValue && last_use[each.value] == i && each.value != result_) {
        have.erase(each.value);
      }
    }
  }
  c10::Storage result = std::move(have.at(result_));
  TORCH_CHECK(result.nbytes() == bytes_, kOther);
  return result;
}

}  // namespace ebb

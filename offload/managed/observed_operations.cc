#include "offload/managed/observed_operations.h"

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include <ATen/core/List.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/TensorOptions.h>
#include <c10/util/ScopeExit.h>
#include <c10/util/SmallVector.h>
#include <torch/library.h>

#include "offload/base/backward_pass.h"
#include "offload/base/log.h"
#include "offload/base/managed_key.h"
#include "offload/base/references.h"
#include "offload/managed/collective.h"
#include "offload/managed/registry.h"

namespace ebb {
namespace {

constexpr std::string_view kOurs = "ebb: ";  // errors begin so, and the log does by itself

// TensorImpl's key set is protected: a pointer to the member can be named in a derived class only.
struct KeySetOf : c10::TensorImpl {
  static constexpr auto member() { return &KeySetOf::key_set_; }
};

c10::DispatchKeySet& key_set(const at::Tensor& tensor) { return tensor.unsafeGetTensorImpl()->*KeySetOf::member(); }

// The managed storages among an operation's arguments, in use as long as this lives.
class Uses {
 public:
  Uses() = default;
  Uses(const Uses&) = delete;
  Uses& operator=(const Uses&) = delete;
  ~Uses() {
    for_each_set([](ManagedSet& set, std::span<const ManagedSet::Use> uses) { set.end(uses); });
    for (const std::shared_ptr<ManagedSet>& set : to_prefetch_) {
      set->prefetch();
    }
  }

  void add(const at::Tensor& tensor, bool written) {
    if (!tensor.defined() || !is_managed(tensor) || !tensor.has_storage()) {
      return;
    }
    Registry::Found found = Registry::all().find(tensor.storage().unsafeGetStorageImpl());
    if (found.set == nullptr) {
      Registry::all().refuse_parents(tensor.storage().unsafeGetStorageImpl());
    }
    if (found.managed == nullptr) {
      if (found.watched != nullptr) {
        found.watched->used_on(found.set->residency().tier().current_stream());
        watched_.push_back(std::move(found.watched));
      }
      return;
    }
    if (ManagedSet::Use* const known = use_of(found.managed.get())) {
      known->written = known->written || written;
      return;
    }
    found.set->residency().check_process();
    if (found.work != nullptr) {
      found.work->before_use();
    }
    uses_.push_back({found.managed, written});
    sets_.push_back(found.set);
    found.managed->begin_use();
  }

  void add(const c10::IValue& value, bool written) {
    if (value.isTensor()) {
      add(value.toTensor(), written);
    } else if (value.isList()) {
      for (const c10::IValue& each : value.toListRef()) {
        add(each, written);
      }
    }
  }

  // With all of the operation's arguments.
  void add_all(const c10::FunctionSchema& schema, at::ArrayRef<c10::IValue> values);

  // Whether one of the storages is on a CPU, where nothing but the program's waiting orders another thread's work.
  [[nodiscard]] bool are_on_a_cpu() const {
    return std::ranges::any_of(sets_, [](const auto& set) { return set->residency().tier().device().is_cpu(); });
  }

  void bring() {
    for_each_set([this](ManagedSet& set, std::span<const ManagedSet::Use> uses) {
      if (set.bring(uses, set.residency().tier().current_stream())) {
        to_prefetch_.push_back(set.shared_from_this());
      }
    });
  }

 private:
  // Null where there is none so far.
  ManagedSet::Use* use_of(const ManagedStorage* storage) {
    constexpr std::size_t kFew = 16;
    if (uses_.size() <= kFew) {
      const auto is_same = [storage](const ManagedSet::Use& use) { return use.storage.get() == storage; };
      const auto known = std::ranges::find_if(uses_, is_same);
      return known == uses_.end() ? nullptr : &*known;
    }
    while (places_.size() < uses_.size()) {
      places_.emplace(uses_[places_.size()].storage.get(), places_.size());
    }
    const auto known = places_.find(storage);
    return known == places_.end() ? nullptr : &uses_[known->second];
  }

  // Calls with each set, and its uses in a row.
  template <typename Call>
  void for_each_set(const Call& call) {
    for (std::size_t begin = 0; begin < uses_.size();) {
      std::size_t end = begin + 1;
      while (end < uses_.size() && sets_[end] == sets_[begin]) {
        ++end;
      }
      call(*sets_[begin], std::span<const ManagedSet::Use>(uses_.data() + begin, end - begin));
      begin = end;
    }
  }

  c10::SmallVector<std::shared_ptr<ManagedSet>, 1> to_prefetch_;  // when the use is over
  c10::SmallVector<std::shared_ptr<ManagedSet>, 4> sets_;         // destroyed after the storages
  c10::SmallVector<ManagedSet::Use, 4> uses_;
  std::unordered_map<const ManagedStorage*, std::size_t> places_;  // in uses_, once there are more than a few
  c10::SmallVector<std::shared_ptr<Registry::Watched>, 1> watched_;
};

// Whether the operation takes a tensor's sizes and kind alone, and makes a new one of which all elements are equal.
bool makes_one_like_another(const c10::FunctionSchema& schema) {
  const std::string& name = schema.name();
  return name == "aten::zeros_like" || name == "aten::ones_like" || name == "aten::full_like";
}

// How many observed operations the calling thread is in.
thread_local int observed_here = 0;

// Whether the operation reads and writes no bytes of its arguments, though it makes no views.
bool touches_no_bytes(const c10::FunctionSchema& schema) {
  static const auto* const names = new std::unordered_set<std::string>{
      "aten::empty_like",        "aten::rand_like",      "aten::randn_like", "aten::new_empty",
      "aten::new_empty_strided", "aten::new_zeros",      "aten::new_ones",   "aten::new_full",
      "aten::is_same_size",      "aten::requires_grad_", "aten::detach_",    "aten::retain_grad"};
  return names->contains(schema.name());
}

// Whether the operation may write to all of its arguments. Kernels from outside of LibTorch's core need not say what
// they write to (c10d::allreduce_ does not), and neither do those that keep running statistics.
bool may_write_anywhere(const c10::FunctionSchema& schema) {
  const std::string& name = schema.name();
  return !(name.starts_with("aten::") || name.starts_with("prims::")) || name.find("batch_norm") != std::string::npos ||
         name.find("instance_norm") != std::string::npos;
}

// Whether the schema says that the operation writes to the argument, and the operation does: record_stream, of which
// the schema says so, writes no bytes.
bool writes_to(const c10::Argument& argument, const c10::FunctionSchema& schema) {
  const c10::AliasInfo* const alias = argument.alias_info();
  return alias != nullptr && alias->isWrite() && schema.name() != "aten::record_stream";
}

void Uses::add_all(const c10::FunctionSchema& schema, at::ArrayRef<c10::IValue> values) {
  const bool writes_anywhere = may_write_anywhere(schema);
  for (std::size_t i = 0; i < values.size(); ++i) {
    add(values[i], writes_anywhere || writes_to(schema.arguments()[i], schema));
  }
}

// Whether the operation makes views of its arguments and touches no bytes.
bool only_makes_views(const c10::FunctionSchema& schema) {
  const auto is_view = [](const c10::Argument& result) {
    return result.alias_info() != nullptr && !result.alias_info()->isWrite();
  };
  const auto is_read = [](const c10::Argument& argument) {  // where to split another tensor, say
    return argument.alias_info() == nullptr && argument.type()->kind() == c10::TypeKind::TensorType;
  };
  return !schema.returns().empty() && std::ranges::all_of(schema.returns(), is_view) &&
         std::ranges::none_of(schema.arguments(), is_read);
}

Registry::Found found_of(const at::Tensor& tensor) {
  return tensor.has_storage() ? Registry::all().find(tensor.storage().unsafeGetStorageImpl()) : Registry::Found();
}

// The set that is to manage what an optimizer makes like this tensor; null for all that is no optimizer's.
std::shared_ptr<ManagedSet> set_for_states_like(const c10::IValue& value) {
  if (!value.isTensor() || at::GradMode::is_enabled() || in_backward() || observed_here > 0) {
    return nullptr;
  }
  const at::Tensor& tensor = value.toTensor();
  const bool is_parameter = tensor.defined() && is_managed(tensor) && tensor.is_leaf() && tensor.requires_grad();
  return is_parameter ? found_of(tensor).set : nullptr;
}

void manage_state(const std::shared_ptr<ManagedSet>& set, const at::Tensor& state, const c10::Storage& parameter) {
  if (!set->takes_states() || !set->takes(state) || is_managed(state) || references_to(state.storage()) != 1) {
    return;
  }
  try_to_manage(set, state);
  Registry::all().belongs_to(state.storage().unsafeGetStorageImpl(), parameter);
}

// Whether the operation does the same to each place of its lists, as the ones with these names do but for those that
// take a tensor with a number for each place.
bool works_place_by_place(const c10::FunctionSchema& schema) {
  const std::string& name = schema.name();
  return (name.starts_with("aten::_foreach_") || name.starts_with("aten::_fused_") ||
          name.starts_with("aten::_amp_foreach_")) &&
         std::ranges::none_of(schema.arguments(), [](const c10::Argument& argument) {
           return argument.name() == "scalars" && argument.type()->kind() == c10::TypeKind::TensorType;
         });
}

// The bound of the set that manages the first managed tensor in these lists.
std::uint64_t bound_of(at::ArrayRef<c10::IValue> arguments) {
  for (const c10::IValue& each : arguments) {
    if (!each.isTensorList()) {
      continue;
    }
    for (const c10::IValue& value : each.toListRef()) {
      const at::Tensor& tensor = value.toTensor();
      if (tensor.defined() && is_managed(tensor) && tensor.has_storage()) {
        const auto set = found_of(tensor).set;
        return set == nullptr ? ~std::uint64_t{0} : set->device_bytes();
      }
    }
  }
  return ~std::uint64_t{0};
}

// The lists of an operation that works place by place, and how it runs on a part of them.
class InParts {
 public:
  InParts(const c10::OperatorHandle& operation, const torch::jit::Stack& stack)
      : operation_(operation), arguments_(torch::jit::last(stack, operation.schema().arguments().size()).vec()) {
    for (const c10::IValue& each : arguments_) {
      if (each.isTensorList()) {
        places_ = std::max(places_, each.toListRef().size());
      }
    }
  }

  // Whether the lists are as the operation wants them: of one length, but for those of a fused operation that it does
  // without. Otherwise the operation itself knows what to say.
  [[nodiscard]] bool are_alike() const {
    const bool may_be_empty = operation_.schema().name().starts_with("aten::_fused_");
    return std::ranges::all_of(arguments_, [&](const c10::IValue& each) {
      return !each.isList() || is_cut(each) || (may_be_empty && each.toListRef().empty());
    });
  }

  // The ends of parts whose managed storages are within `bytes` each, or of one place.
  [[nodiscard]] std::vector<std::size_t> ends(std::uint64_t bytes) const {
    std::vector<std::size_t> ends;
    std::uint64_t in_part = 0;
    for (std::size_t place = 0; place < places_; ++place) {
      std::uint64_t here = 0;
      for (const c10::IValue& each : arguments_) {
        if (is_cut(each) && each.isTensorList()) {
          here += managed_bytes(each.toListRef()[place].toTensor());
        }
      }
      if (place > 0 && in_part + here > bytes) {
        ends.push_back(place);
        in_part = 0;
      }
      in_part += here;
    }
    ends.push_back(places_);
    return ends;
  }

  void run(const std::vector<std::size_t>& ends, torch::jit::Stack* stack) const {
    torch::jit::drop(*stack, arguments_.size());
    std::vector<c10::impl::GenericList> results;
    std::size_t begin = 0;
    for (const std::size_t end : ends) {
      torch::jit::Stack part;
      for (const c10::IValue& each : arguments_) {
        part.push_back(is_cut(each) ? c10::IValue(cut(each.toList(), begin, end)) : each);
      }
      operation_.callBoxed(&part);  // is observed as an operation of its own
      for (std::size_t i = 0; i < part.size(); ++i) {
        if (begin == 0) {
          results.push_back(part[i].toList());
        } else {
          results[i].append(part[i].toList());
        }
      }
      begin = end;
    }
    for (c10::impl::GenericList& each : results) {
      stack->emplace_back(std::move(each));
    }
  }

 private:
  [[nodiscard]] bool is_cut(const c10::IValue& value) const {
    return value.isList() && value.toListRef().size() == places_;
  }

  static c10::impl::GenericList cut(const c10::impl::GenericList& list, std::size_t begin, std::size_t end) {
    c10::impl::GenericList part(list.elementType());
    for (std::size_t place = begin; place < end; ++place) {
      part.push_back(list.get(place));
    }
    return part;
  }

  static std::uint64_t managed_bytes(const at::Tensor& tensor) {
    if (!tensor.defined() || !is_managed(tensor)) {
      return 0;
    }
    const Registry::Found found = found_of(tensor);
    return found.managed == nullptr ? 0 : found.managed->bytes();
  }

  const c10::OperatorHandle& operation_;
  const std::vector<c10::IValue> arguments_;
  std::size_t places_ = 0;
};

// Returns false where Registry::add does.
bool manage(const std::shared_ptr<ManagedSet>& set, const at::Tensor& tensor, const ManagedSet::Slot& slot,
            Registry::Stays stays) {
  const c10::Device device = set->residency().tier().device();
  if (!tensor.defined() || tensor.layout() != c10::kStrided || tensor.is_nested() || !tensor.has_storage() ||
      tensor.device() != device) {
    throw std::invalid_argument("ebb: only dense tensors on " + device.str() + " can be managed");
  }
  if (!set->takes(tensor)) {
    return true;
  }
  const bool is_added = Registry::all().add(tensor.storage(), set, slot, stays);
  if (is_added) {
    key_set(tensor) = tensor.key_set() | c10::DispatchKeySet(kManagedKey);
  }
  return is_added;
}

void observe(const c10::OperatorHandle& operation, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const c10::FunctionSchema& schema = operation.schema();
  const c10::DispatchKeySet below = keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kManagedKey);
  if (only_makes_views(schema) || touches_no_bytes(schema)) {
    operation.redispatchBoxed(below, stack);
    return;
  }
  if (makes_one_like_another(schema)) {
    const c10::IValue like = torch::jit::peek(*stack, 0, schema.arguments().size());
    const std::shared_ptr<ManagedSet> set = set_for_states_like(like);
    operation.redispatchBoxed(below, stack);
    if (set != nullptr && torch::jit::peek(*stack, 0, 1).isTensor()) {
      manage_state(set, torch::jit::peek(*stack, 0, 1).toTensor(), like.toTensor().storage());
    }
    return;
  }
  if (works_place_by_place(schema)) {
    const InParts parts(operation, *stack);
    if (parts.are_alike()) {
      const auto ends = parts.ends(bound_of(torch::jit::last(*stack, schema.arguments().size())));
      if (ends.size() > 1) {
        parts.run(ends, stack);
        return;
      }
    }
  }
  ++observed_here;  // what the operation makes for itself is no state
  const auto over = c10::make_scope_exit([] { --observed_here; });
  if (is_collective(schema)) {
    const auto uses = std::make_shared<Uses>();
    uses->add_all(schema, torch::jit::last(*stack, schema.arguments().size()));
    uses->bring();
    operation.redispatchBoxed(below, stack);
    const c10::ArrayRef<c10::IValue> results = torch::jit::last(*stack, schema.returns().size());
    if (uses->are_on_a_cpu()) {
      hold_until_over(results, uses);
    } else {
      wait_for_works(results);
    }
    return;
  }
  Uses uses;
  uses.add_all(schema, torch::jit::last(*stack, schema.arguments().size()));
  uses.bring();
  operation.redispatchBoxed(below, stack);
}

}  // namespace

void manage(const std::shared_ptr<ManagedSet>& set, const at::Tensor& tensor, const ManagedSet::Slot& slot) {
  TORCH_CHECK(manage(set, tensor, slot, Registry::Stays::kNo),
              "ebb: another thread is using a tensor that is to be managed");
}

void manage_around(const std::shared_ptr<ManagedSet>& set, const at::Tensor& tensor) {
  static_cast<void>(manage(set, tensor, /*slot=*/nullptr, Registry::Stays::kYes));
}

bool watch(const std::shared_ptr<ManagedSet>& set, const at::Tensor& tensor) {
  if (is_managed(tensor)) {
    return true;
  }
  if (const auto by = found_of(tensor).set; by != nullptr && by != set) {
    return false;
  }
  manage_around(set, tensor);
  // Whoever gets the tensor after this sees the key, and whoever has got it before is counted here.
  std::atomic_thread_fence(std::memory_order_seq_cst);
  constexpr std::size_t kCallersAndOneMore = 2;
  if (references_to(tensor) > kCallersAndOneMore) {
    key_set(tensor) = tensor.key_set() - c10::DispatchKeySet(kManagedKey);
    return false;
  }
  return true;
}

bool has_home(const at::Tensor& tensor) { return is_managed(tensor) && found_of(tensor).managed != nullptr; }

void manage_beside(const at::Tensor& managed, const at::Tensor& other) {
  if (!managed.defined() || !is_managed(managed)) {
    return;
  }
  if (const std::shared_ptr<ManagedSet> set = found_of(managed).set) {
    manage_state(set, other, managed.storage());
  }
}

void release(const std::shared_ptr<ManagedSet>& set, at::TensorList tensors) {
  for (const c10::Storage& storage : Registry::all().with_states_of(tensors, *set)) {
    const at::Tensor bytes = bytes_of(storage);
    const OnDevice use(bytes);  // after what was put off
    if (const auto managed = found_of(bytes).managed) {
      managed->release();
      set->remove(managed);
    }
    Registry::all().remove(storage.unsafeGetStorageImpl());
  }
  for (const at::Tensor& each : tensors) {
    if (found_of(each).set == nullptr) {
      key_set(each) = each.key_set() - c10::DispatchKeySet(kManagedKey);
    }
  }
}

bool try_to_manage(const std::shared_ptr<ManagedSet>& set, const at::Tensor& tensor, const ManagedSet::Slot& slot) {
  const auto warn = [&](std::string_view why) {
    if (set->is_first_refusal()) {
      why.remove_prefix(why.starts_with(kOurs) ? kOurs.size() : 0);
      log_warning("gradients or optimizer states stay on the device: " + std::string(why));
    }
  };
  try {
    if (!manage(set, tensor, slot, Registry::Stays::kNo)) {
      return false;
    }
    set->fit();
  } catch (const c10::Error& error) {
    warn(error.what_without_backtrace());
  } catch (const std::exception& error) {
    warn(error.what());
  }
  return true;
}

class OnDevice::Uses : public ebb::Uses {};

OnDevice::OnDevice(at::TensorList tensors) : uses_(std::make_unique<Uses>()) {
  for (const at::Tensor& tensor : tensors) {
    uses_->add(tensor, /*written=*/false);
  }
  uses_->bring();
}

OnDevice::~OnDevice() = default;

namespace {

// The target, and the first of the others.
PostponedWork::Brought bring_to_device(const at::Tensor& target, const std::vector<at::Tensor>& others) {
  std::vector<at::Tensor> first{target};
  if (!others.empty()) {
    first.push_back(others.front());
  }
  return {std::make_shared<OnDevice>(first), nullptr};
}

// Null where some of the tensors may be used without being seen.
std::shared_ptr<PostponedWork> postpone(const at::Tensor& target, at::TensorList others, PostponedWork::Bring bring,
                                        PostponedWork::Work work, PostponedWork::TargetUse target_use) {
  std::vector<at::Tensor> all = others.vec();
  all.push_back(target);
  if (!std::ranges::all_of(all, [](const at::Tensor& each) { return is_managed(each) && each.has_storage(); })) {
    return nullptr;
  }
  const auto shares_targets = [&](const at::Tensor& other) {
    return other.storage().unsafeGetStorageImpl() == target.storage().unsafeGetStorageImpl();
  };
  if (std::ranges::any_of(others, shares_targets)) {  // the work would keep the target alive
    return nullptr;
  }
  const std::shared_ptr<ManagedSet> set = found_of(target).set;
  if (set == nullptr) {
    return nullptr;
  }
  refuse_capture(target);
  auto postponed = std::make_shared<PostponedWork>(set->shared_residency(), target, others, std::move(bring),
                                                   std::move(work), target_use);
  return Registry::all().postpone(all, postponed) ? postponed : nullptr;
}

}  // namespace

void refuse_capture(const at::Tensor& managed) {
  const std::shared_ptr<ManagedSet> set = is_managed(managed) ? found_of(managed).set : nullptr;
  TORCH_CHECK(set == nullptr || !set->residency().tier().captures(),
              "ebb: an update of a managed tensor cannot be part of a CUDA graph");
}

bool postpone(const at::Tensor& target, at::TensorList others,
              std::function<void(const at::Tensor&, const std::vector<at::Tensor>&)> work,
              PostponedWork::TargetUse target_use) {
  return postpone(
             target, others, &bring_to_device,
             [work = std::move(work)](const at::Tensor& on, const auto& with, AtHome*) { work(on, with); },
             target_use) != nullptr;
}

std::shared_ptr<PostponedWork> postpone_at_home(const at::Tensor& target, at::TensorList others,
                                                PostponedWork::Work work, PostponedWork::TargetUse target_use,
                                                std::function<void()> prepare_on_device) {
  std::vector<Registry::Found> found;
  std::vector<std::weak_ptr<ManagedStorage>> changing;
  for (const at::Tensor& each : others) {
    found.push_back(found_of(each));
  }
  found.push_back(found_of(target));
  for (const Registry::Found& each : found) {
    changing.push_back(each.managed);
  }
  const auto set_are_about_to_change = [changing](bool are_about_to) {
    for (const std::weak_ptr<ManagedStorage>& each : changing) {
      if (const std::shared_ptr<ManagedStorage> storage = each.lock()) {
        storage->set_is_about_to_change(are_about_to);
      }
    }
  };
  const auto bring = [prepare = std::move(prepare_on_device)](const at::Tensor& on,
                                                              const std::vector<at::Tensor>& with) {
    std::vector<at::Tensor> all{on};
    all.insert(all.end(), with.begin(), with.end());
    PostponedWork::Brought brought{nullptr, AtHome::of(all)};
    if (brought.at_home == nullptr) {
      brought = bring_to_device(on, with);
      if (prepare != nullptr) {
        prepare();
      }
    }
    return brought;
  };
  for (const Registry::Found& each : found) {  // earlier work ends with setting the same
    if (each.work != nullptr) {
      each.work->before_use();
    }
  }
  set_are_about_to_change(true);  // before the work can run
  auto undo = c10::make_scope_exit([&] { set_are_about_to_change(false); });
  auto postponed = postpone(
      target, others, bring,
      [set_are_about_to_change, work = std::move(work)](const at::Tensor& on, const auto& with, AtHome* home) {
        const auto over = c10::make_scope_exit([&] { set_are_about_to_change(false); });
        work(on, with, home);
      },
      target_use);
  if (postponed == nullptr) {
    return nullptr;
  }
  undo.release();
  try {
    for (const Registry::Found& each : found) {
      each.set->send_home(each.managed);
    }
  } catch (const std::bad_alloc&) {  // an early start is all that is lost
  }
  return postponed;
}

at::Tensor bytes_of(const c10::Storage& storage) {
  const c10::DispatchKey backend = c10::computeDispatchKey(c10::kByte, c10::kStrided, storage.device());
  c10::DispatchKeySet keys(backend);
  if (Registry::all().find(storage.unsafeGetStorageImpl()).managed != nullptr) {
    keys = keys | c10::DispatchKeySet(kManagedKey);
  }
  at::Tensor bytes =
      at::detail::make_tensor<c10::TensorImpl>(c10::Storage(storage), keys, caffe2::TypeMeta::Make<std::uint8_t>());
  bytes.unsafeGetTensorImpl()->set_sizes_contiguous({static_cast<std::int64_t>(storage.nbytes())});
  return bytes;
}

void let_addresses_be_read(bool let) {
  ManagedStorage::let_addresses_be_read(let);
  for (const Registry::Found& each : Registry::all().managed()) {
    each.managed->renew_refusal();
  }
}

void forget_ended_storages() { Registry::all().forget_the_dead(); }

}  // namespace ebb

// The library has one fallback for all operations.
TORCH_LIBRARY_IMPL(_, TESTING_ONLY_GenericMode, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&ebb::observe>());
}

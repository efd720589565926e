#include "offload/managed/observed_operations.h"

#include <algorithm>
#include <cstddef>
#include <memory>
#include <set>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include <ATen/core/List.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/util/SmallVector.h>
#include <torch/library.h>

#include "offload/base/backward_pass.h"
#include "offload/base/managed_key.h"
#include "streams/base/mutex.h"

namespace ebb {
namespace {

// TensorImpl's key set is protected: a pointer to the member can be named in a derived class only.
struct KeySetOf : c10::TensorImpl {
  static constexpr auto member() { return &KeySetOf::key_set_; }
};

c10::DispatchKeySet& key_set(const at::Tensor& tensor) { return tensor.unsafeGetTensorImpl()->*KeySetOf::member(); }

// Which set manages a storage. A storage is known by identity: the weak reference keeps the StorageImpl's own address
// from being used again.
class Registry {
 public:
  struct Entry {
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;
    std::weak_ptr<ManagedStorage> managed;
    std::shared_ptr<ManagedSet> set;
  };
  struct Found {
    std::shared_ptr<ManagedStorage> managed;
    ManagedSet* set = nullptr;  // lives as long as `managed`'s storage
  };

  static Registry& all() {
    static auto* const registry = new Registry;  // operations run until the process has ended
    return *registry;
  }

  [[nodiscard]] Found find(const c10::StorageImpl* storage) {
    const SharedLock lock(mutex_);
    const auto known = entries_.find(storage);
    return known == entries_.end() ? Found{} : Found{known->second.managed.lock(), known->second.set.get()};
  }

  // The set that manages a storage; null if none does.
  [[nodiscard]] std::shared_ptr<ManagedSet> set_of(const c10::StorageImpl* storage) {
    const SharedLock lock(mutex_);
    const auto known = entries_.find(storage);
    return known == entries_.end() ? nullptr : known->second.set;
  }

  void add(const c10::Storage& storage, const std::shared_ptr<ManagedSet>& set, const ManagedSet::Slot& slot) {
    std::vector<Entry> dead;  // destroyed after the lock is released: the last reference to a set may be among them
    const MutexLock lock(mutex_);
    if (entries_.size() >= look_for_dead_at_) {
      forget_the_dead(dead);
      look_for_dead_at_ = 2 * entries_.size() + 64;
    }
    if (const auto known = entries_.find(storage.unsafeGetStorageImpl()); known != entries_.end()) {
      TORCH_CHECK(known->second.set == set, "ebb: another offloader manages this storage already");
      return;
    }
    entries_.emplace(storage.unsafeGetStorageImpl(), Entry{storage.getWeakStorageImpl(), set->add(storage, slot), set});
  }

  void forget_the_dead() {
    std::vector<Entry> dead;  // destroyed after the lock is released: the last reference to a set may be among them
    const MutexLock lock(mutex_);
    forget_the_dead(dead);
  }

 private:
  void forget_the_dead(std::vector<Entry>& dead) EBB_REQUIRES(mutex_) {
    std::set<ManagedSet*> sets;
    for (auto at = entries_.begin(); at != entries_.end();) {
      if (at->second.storage.expired()) {
        sets.insert(at->second.set.get());
        dead.push_back(std::move(at->second));
        at = entries_.erase(at);
      } else {
        ++at;
      }
    }
    for (ManagedSet* const set : sets) {  // alive by `dead`
      set->forget_the_dead();
    }
  }

  SharedMutex mutex_;
  std::unordered_map<const c10::StorageImpl*, Entry> entries_ EBB_GUARDED_BY(mutex_);
  std::size_t look_for_dead_at_ EBB_GUARDED_BY(mutex_) = 64;  // so many entries
};

// The managed storages among an operation's arguments, in use as long as this lives.
class Uses {
 public:
  Uses() = default;
  Uses(const Uses&) = delete;
  Uses& operator=(const Uses&) = delete;
  ~Uses() {
    for (std::size_t i = 0; i < storages_.size(); ++i) {
      storages_[i]->end_use(written_[i]);
    }
  }

  void add(const at::Tensor& tensor, bool written) {
    if (!tensor.defined() || !is_managed(tensor) || !tensor.has_storage()) {
      return;
    }
    const Registry::Found found = Registry::all().find(tensor.storage().unsafeGetStorageImpl());
    if (found.managed == nullptr) {
      return;
    }
    const auto known = std::ranges::find(storages_, found.managed);
    if (known != storages_.end()) {
      bool& known_written = written_[static_cast<std::size_t>(known - storages_.begin())];
      known_written = known_written || written;
      return;
    }
    storages_.push_back(found.managed);
    written_.push_back(written);
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

  void bring() {
    for (std::size_t begin = 0; begin < storages_.size();) {
      std::size_t end = begin + 1;
      while (end < storages_.size() && sets_[end] == sets_[begin]) {
        ++end;
      }
      ManagedSet& set = *sets_[begin];
      set.bring({storages_.data() + begin, end - begin}, set.residency().tier().current_stream());
      begin = end;
    }
  }

 private:
  c10::SmallVector<std::shared_ptr<ManagedStorage>, 4> storages_;
  c10::SmallVector<bool, 4> written_;
  c10::SmallVector<ManagedSet*, 4> sets_;
};

// Whether the operation takes a tensor's sizes and kind alone, and makes a new one of which all elements are equal.
bool makes_one_like_another(const c10::FunctionSchema& schema) {
  const std::string& name = schema.name();
  return name.ends_with("_like") &&
         (name == "aten::zeros_like" || name == "aten::ones_like" || name == "aten::full_like");
}

// How many observed operations the calling thread is in.
thread_local int depth = 0;

class Deeper {
 public:
  Deeper() { ++depth; }
  ~Deeper() { --depth; }
  Deeper(const Deeper&) = delete;
  Deeper& operator=(const Deeper&) = delete;
};

// Whether the operation makes views of its arguments and touches no bytes.
bool only_makes_views(const c10::FunctionSchema& schema) {
  const auto is_view = [](const c10::Argument& result) {
    return result.alias_info() != nullptr && !result.alias_info()->isWrite();
  };
  return !schema.returns().empty() && std::ranges::all_of(schema.returns(), is_view);
}

// The set that is to manage what an optimizer makes like this tensor; null for all that is no optimizer's.
std::shared_ptr<ManagedSet> set_for_states_like(const c10::IValue& value) {
  if (!value.isTensor() || at::GradMode::is_enabled() || in_backward() || depth > 0) {
    return nullptr;
  }
  const at::Tensor& tensor = value.toTensor();
  const bool is_parameter = tensor.defined() && is_managed(tensor) && tensor.is_leaf() && tensor.requires_grad();
  return is_parameter ? Registry::all().set_of(tensor.storage().unsafeGetStorageImpl()) : nullptr;
}

void manage_state(const std::shared_ptr<ManagedSet>& set, const at::Tensor& state) {
  if (set->takes(state) && !is_managed(state) && state.storage().use_count() == 1) {
    manage(set, state);
    set->fit();
  }
}

void observe(const c10::OperatorHandle& operation, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const c10::FunctionSchema& schema = operation.schema();
  const c10::DispatchKeySet below = keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kManagedKey);
  if (only_makes_views(schema)) {
    operation.redispatchBoxed(below, stack);
    return;
  }
  if (makes_one_like_another(schema)) {
    const std::shared_ptr<ManagedSet> set = set_for_states_like(torch::jit::peek(*stack, 0, schema.arguments().size()));
    operation.redispatchBoxed(below, stack);
    if (set != nullptr && torch::jit::peek(*stack, 0, 1).isTensor()) {
      manage_state(set, torch::jit::peek(*stack, 0, 1).toTensor());
    }
    return;
  }
  const Deeper deeper;  // what the operation makes for itself is no state
  Uses uses;
  const std::vector<c10::Argument>& arguments = schema.arguments();
  const auto values = torch::jit::last(*stack, arguments.size());
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    const c10::AliasInfo* const alias = arguments[i].alias_info();
    uses.add(values[i], alias != nullptr && alias->isWrite());
  }
  uses.bring();
  operation.redispatchBoxed(below, stack);
}

}  // namespace

void manage(const std::shared_ptr<ManagedSet>& set, const at::Tensor& tensor, const ManagedSet::Slot& slot) {
  const c10::Device device = set->residency().tier().device();
  if (!tensor.defined() || tensor.layout() != c10::kStrided || !tensor.has_storage() || tensor.device() != device) {
    throw std::invalid_argument("ebb: only dense tensors on " + device.str() + " can be managed");
  }
  if (set->takes(tensor)) {
    Registry::all().add(tensor.storage(), set, slot);
    key_set(tensor) = tensor.key_set() | c10::DispatchKeySet(kManagedKey);
  }
}

void manage_beside(const at::Tensor& managed, const at::Tensor& other) {
  if (!managed.defined() || !is_managed(managed)) {
    return;
  }
  if (const std::shared_ptr<ManagedSet> set = Registry::all().set_of(managed.storage().unsafeGetStorageImpl())) {
    manage_state(set, other);
  }
}

class OnDevice::Uses : public ebb::Uses {};

OnDevice::OnDevice(std::initializer_list<at::Tensor> tensors) : uses_(std::make_unique<Uses>()) {
  for (const at::Tensor& tensor : tensors) {
    uses_->add(tensor, /*written=*/false);
  }
  uses_->bring();
}

OnDevice::~OnDevice() = default;

void forget_ended_storages() { Registry::all().forget_the_dead(); }

}  // namespace ebb

// The library has one fallback for all operations.
TORCH_LIBRARY_IMPL(_, TESTING_ONLY_GenericMode, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&ebb::observe>());
}

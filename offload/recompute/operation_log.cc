#include "offload/recompute/operation_log.h"

#include <algorithm>
#include <exception>
#include <mutex>

#include <ATen/Context.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/variable.h>

#include "offload/base/autograd_info.h"
#include "offload/base/log.h"
#include "offload/base/managed_key.h"
#include "offload/steps/saved_step.h"

namespace ebb {
namespace {

using c10::DispatchKey;
using c10::DispatchKeySet;

// Of the newest, which a log has. A forward pass of a hundred Transformer blocks is about six thousand operations.
constexpr std::size_t kMostOperations = 8192;
constexpr std::size_t kMostValues = 2 * kMostOperations;

// Whose tensors or modes see an operation before any kernel does.
const DispatchKeySet kTakenOver({DispatchKey::Python, DispatchKey::PythonTLSSnapshot,
                                 DispatchKey::FuncTorchDynamicLayerFrontMode, DispatchKey::FuncTorchGradWrapper,
                                 DispatchKey::FuncTorchBatched, DispatchKey::FuncTorchVmapMode, DispatchKey::Batched,
                                 DispatchKey::VmapMode, DispatchKey::Functionalize, DispatchKey::Tracer});

const DispatchKeySet kNotPlain =
    kTakenOver | DispatchKeySet({DispatchKey::Conjugate, DispatchKey::Negative, DispatchKey::ZeroTensor});

// Whether the storage has versions by which its values can be told apart.
bool is_tracked(const at::Tensor& tensor) {
  return tensor.defined() && tensor.layout() == at::kStrided && !tensor.is_nested() && !tensor.is_inference() &&
         tensor.has_storage() && !tensor.unsafeGetTensorImpl()->has_symbolic_sizes_strides() &&
         tensor.storage().unsafeGetStorageImpl() != nullptr;
}

bool is_plain(const at::Tensor& tensor) {
  return is_tracked(tensor) && !tensor.is_quantized() && !tensor.key_set().has_any(kNotPlain);
}

template <typename Visit>
void for_each_tensor(const c10::IValue& value, const Visit& visit) {
  if (value.isTensor()) {
    visit(value.toTensor());
  } else if (value.isList()) {
    for (const c10::IValue& each : value.toListRef()) {
      if (each.isTensor()) {
        visit(each.toTensor());
      }
    }
  }
}

bool has_tensors(const c10::IValue& value) {
  if (value.isTensor()) {
    return true;
  }
  if (!value.isList() || value.isIntList() || value.isDoubleList() || value.isBoolList()) {
    return false;
  }
  return std::ranges::any_of(value.toListRef(), [](const c10::IValue& each) { return each.isTensor(); });
}

bool opens_entry(const OperatorTraits& traits, DispatchKeySet keys) {
  const bool on_cuda = keys.has_backend(c10::BackendComponent::CUDABit);
  return !(on_cuda ? traits.is_composite_on_cuda : traits.is_composite_on_cpu) && !keys.has_any(kTakenOver) &&
         !(traits.is_cast && keys.has_any(c10::autocast_dispatch_keyset));
}

// A transposed convolution is the backward of another one, to its input.
bool is_transposed(const c10::FunctionSchema& schema, c10::ArrayRef<c10::IValue> arguments) {
  const auto said = schema.argumentIndexWithName("transposed");
  return said ? arguments[*said].toBool() : schema.name().find("transpose") != std::string::npos;
}

// cuDNN's forward convolutions have the same bits in each run of one algorithm. Which algorithm runs is looked up by
// sizes and settings; with benchmarkCuDNN(), each thread measures for itself. Some backward algorithms add in any
// order. Source: the table of reproducible algorithms in cuDNN's documentation; aten/src/ATen/native/cudnn/Conv_v8.cpp.
bool is_as_before(const OperatorTraits& traits, const c10::FunctionSchema& schema, c10::ArrayRef<c10::IValue> arguments,
                  c10::Device device) {
  const at::Context& settings = at::globalContext();
  if (traits.may_vary && !settings.deterministicAlgorithms()) {  // a CPU's threads add as they come, too
    return false;
  }
  if (!device.is_cuda() || !traits.is_convolution) {
    return true;
  }
  return !settings.benchmarkCuDNN() && (settings.deterministicCuDNN() || !is_transposed(schema, arguments));
}

// What the operator does with these arguments.
OperatorTraits with_arguments(const OperatorTraits& traits, c10::ArrayRef<c10::IValue> arguments) {
  OperatorTraits now = traits;
  if (traits.statistics != 0 && !arguments[traits.training].toBool()) {
    now.written &= ~traits.statistics;
    now.statistics = 0;
  }
  return now;
}

bool fills_storage(const at::Tensor& tensor) {
  return tensor.storage_offset() == 0 && tensor.is_non_overlapping_and_dense() &&
         tensor.nbytes() == tensor.storage().nbytes();
}

// Of the generator that the operation draws from; empty where nobody can tell, as while a stream is captured.
std::vector<std::uint8_t> random_state(c10::Device device) {
  try {
    at::Generator generator = at::globalContext().defaultGenerator(device);
    const std::lock_guard lock(generator.mutex());
    const at::Tensor state = generator.get_state();
    const auto* const bytes = state.const_data_ptr<std::uint8_t>();
    return {bytes, bytes + state.numel()};
  } catch (const std::exception&) {
    return {};
  }
}

void include_key(bool included) { c10::impl::tls_set_dispatch_key_included(kManagedKey, included); }

bool is_of_leaf(const at::Tensor& tensor, const AutogradInfo& info) {
  return info.is_leaf() || (info.is_view() && AutogradInfo(tensor._base()).is_leaf());
}

const c10::VariableVersion& counter_of_tensor(const at::Tensor& tensor) {
  return tensor.unsafeGetTensorImpl()->version_counter();
}

struct OfThread {
  ~OfThread() { OperationLog::stop_here(); }
  std::shared_ptr<OperationLog> log;
};
thread_local OfThread of_thread;

}  // namespace

// Does not ask tensors for their nodes: a view would bring its node up to date, which is a new node.
bool is_customs(const at::TensorBase& tensor) {
  const auto* const meta = static_cast<torch::autograd::AutogradMeta*>(tensor.unsafeGetTensorImpl()->autograd_meta());
  if (meta == nullptr) {
    return false;
  }
  return (meta->grad_fn_ != nullptr && is_custom(*meta->grad_fn_)) ||
         (AutogradInfo(tensor).is_view() && is_customs(tensor._base()));
}

OperationLog::Scope::Scope()
    : log_([] {
        if (of_thread.log == nullptr) {
          of_thread.log = std::make_shared<OperationLog>();
        }
        return of_thread.log;
      }()) {
  if (log_->scopes_++ == 0) {
    log_->forget();
  }
  log_->rests_ = false;
  if (!log_->is_open()) {
    include_key(true);
  }
  here_ = log_.get();
}

OperationLog::Scope::~Scope() {
  if (--log_->scopes_ == 0 && log_ == of_thread.log) {  // else the thread's next operation finds out
    log_->forget();
    stop_here();
  }
}

void OperationLog::rest() {
  if (here_ != nullptr && !here_->rests_ && here_->scopes_ == 1 && !here_->is_open()) {
    here_->forget();  // what is not seen from now on
    here_->rests_ = true;
  }
}

void OperationLog::wake() {
  if (here_ != nullptr) {
    here_->rests_ = false;
  }
}

void OperationLog::stop_here() {
  include_key(false);
  here_ = nullptr;
}

OperationLog::Unseen::Unseen()
    : log_(std::exchange(here_, nullptr)), was_included_(c10::impl::tls_is_dispatch_key_included(kManagedKey)) {
  include_key(false);
}

OperationLog::Unseen::~Unseen() {
  here_ = log_;
  include_key(was_included_);
}

bool OperationLog::sees() const { return is_open_ || c10::impl::tls_is_dispatch_key_included(kManagedKey); }

OperationLog::Value::OfRecipes& OperationLog::of_recipes(ValueId id) {
  std::unique_ptr<Value::OfRecipes>& its = values_[id - first_value_].of_recipes;
  if (its == nullptr) {
    its = std::make_unique<Value::OfRecipes>();
  }
  return *its;
}

void OperationLog::before_write(ValueId id, std::function<void(bool is_seen)> what) {
  std::function<void(bool)>& now = of_recipes(id).before_write;
  if (now == nullptr) {
    now = std::move(what);
  } else {  // another offloader's
    now = [first = std::move(now), then = std::move(what)](bool is_seen) {
      first(is_seen);
      then(is_seen);
    };
  }
}

void OperationLog::forget() { forget_oldest(0, 0); }

void OperationLog::forget_but(std::size_t operations) {
  forget_oldest(operations, 2 * operations);
  for (Value& value : values_) {
    if (value.of_recipes != nullptr) {
      value.of_recipes->asked.reset();
    }
  }
}

void OperationLog::forget_oldest(std::size_t operations, std::size_t values) {
  for (; operations_.size() > operations; ++first_operation_) {
    std::shared_ptr<LoggedOperation> oldest = std::move(operations_.front());
    operations_.pop_front();
    take_back(std::move(oldest));
  }
  std::vector<std::function<void(bool)>> unseen;
  for (; values_.size() > values; ++first_value_) {
    Value& oldest = values_.front();
    const auto now = now_.find(oldest.storage._unsafe_get_target());
    if (now != now_.end() && now->second == first_value_) {
      now_.erase(now);
    }
    if (oldest.of_recipes != nullptr && oldest.of_recipes->before_write != nullptr) {
      unseen.push_back(std::move(oldest.of_recipes->before_write));
    }
    values_.pop_front();
  }
  for (const auto& tell : unseen) {
    try {
      tell(/*is_seen=*/false);
    } catch (const std::exception&) {
      log_warning("what a saved tensor is recomputed from could not be copied: do not write to it before backward");
    }
  }
}

std::shared_ptr<LoggedOperation> OperationLog::new_entry(const c10::OperatorHandle& operation) {
  if (spare_.empty()) {
    return std::make_shared<LoggedOperation>(operation);
  }
  std::shared_ptr<LoggedOperation> entry = std::move(spare_.back());
  spare_.pop_back();
  entry->operation = operation;
  return entry;
}

// To be filled anew, unless a recipe has the entry, too.
void OperationLog::take_back(std::shared_ptr<LoggedOperation> entry) noexcept {
  if (entry.use_count() > 1 || spare_.size() >= kMostOperations) {
    return;
  }
  std::atomic_thread_fence(std::memory_order_acquire);  // after another thread's recipe has let go of the entry
  entry->arguments.clear();
  entry->tensors_in.clear();
  entry->tensors.clear();
  entry->made.clear();
  entry->random_state = {};
  try {
    spare_.push_back(std::move(entry));
  } catch (const std::bad_alloc&) {  // the entry ends
  }
}

ValueId OperationLog::value_of(const at::Tensor& tensor) const {
  const auto known = now_.find(tensor.storage().unsafeGetStorageImpl());
  if (known == now_.end()) {
    return kNoValue;
  }
  const Value& value = values_[known->second - first_value_];
  const bool is_it = !value.storage.expired() && value.counter.current_version() == value.version &&
                     value.bytes == tensor.storage().nbytes();
  return is_it ? known->second : kNoValue;
}

ValueId OperationLog::add(const at::Tensor& tensor, std::uint64_t maker, bool is_foreign) {
  const ValueId id = first_value_ + values_.size();
  values_.push_back({.storage = tensor.storage().getWeakStorageImpl(),
                     .counter = counter_of_tensor(tensor),
                     .version = counter_of_tensor(tensor).current_version(),
                     .bytes = tensor.storage().nbytes(),
                     .maker = maker,
                     .is_foreign = is_foreign});
  now_[tensor.storage().unsafeGetStorageImpl()] = id;
  return id;
}

ValueId OperationLog::see(const at::Tensor& tensor) {
  const ValueId known = value_of(tensor);
  return known != kNoValue ? known : add(tensor, kOpaque, /*is_foreign=*/true);
}

// Returns whether the operation can be run again on them.
bool OperationLog::take_arguments(LoggedOperation& entry, c10::ArrayRef<c10::IValue> arguments) {
  bool can_run_again = true;
  const OperatorTraits& traits = entry.traits;
  const auto take = [&](const at::Tensor& tensor, std::size_t argument) {
    LoggedOperation::TensorArgument& taken = entry.tensors.emplace_back();
    if (!tensor.defined()) {
      return;
    }
    if (!is_plain(tensor)) {
      can_run_again = false;
      return;
    }
    taken.value = see(tensor);
    if (is_customs(tensor)) {
      values_[taken.value - first_value_].maker = kOpaque;
    }
    taken.bytes = tensor.storage().nbytes();
    taken.dtype = tensor.scalar_type();
    taken.device = tensor.device();
    taken.is_managed = is_managed(tensor);
    taken.requires_grad = tensor.requires_grad();
    taken.is_of_leaf = taken.requires_grad && is_of_leaf(tensor, AutogradInfo(tensor));
    const bool is_written = traits.may_write_to(argument);
    taken.is_filled_anew =
        is_written && (traits.writes_all || ((traits.statistics >> argument) & 1) != 0) && fills_storage(tensor);
    taken.offset = tensor.storage_offset();
    taken.sizes.assign(tensor.sizes().begin(), tensor.sizes().end());
    taken.strides.assign(tensor.strides().begin(), tensor.strides().end());
    can_run_again = can_run_again && !(is_written && taken.is_managed) &&
                    is_as_before(traits, entry.operation.schema(), arguments, taken.device);
  };
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    const c10::IValue& argument = arguments[i];
    const bool is_number = argument.isTensor() && argument.toTensor().defined() &&
                           argument.toTensor().unsafeGetTensorImpl()->is_wrapped_number();
    if (is_number || !has_tensors(argument)) {
      can_run_again = can_run_again && !argument.isGenerator() && !argument.isObject() && !argument.isCapsule() &&
                      !argument.isSymInt() && !argument.isSymFloat() && !argument.isStream();
      entry.arguments.push_back(argument);
      entry.tensors_in.push_back(LoggedOperation::kNoTensors);
      continue;
    }
    const std::size_t before = entry.tensors.size();
    if (argument.isTensor()) {
      take(argument.toTensor(), i);
    } else {
      for (const c10::IValue& each : argument.toListRef()) {
        take(each.isTensor() ? each.toTensor() : at::Tensor(), i);
      }
    }
    entry.arguments.emplace_back();
    entry.tensors_in.push_back(static_cast<std::uint32_t>(entry.tensors.size() - before));
  }
  for (LoggedOperation::TensorArgument& each : entry.tensors) {  // what also is read is not filled anew
    const auto is_other = [&](const LoggedOperation::TensorArgument& other) {
      return &other != &each && other.value == each.value;
    };
    each.is_filled_anew = each.is_filled_anew && std::ranges::none_of(entry.tensors, is_other);
  }
  return can_run_again;
}

void OperationLog::open() {
  is_open_ = true;
  include_key(false);  // operations inside are not seen
}

void OperationLog::close(bool failed) {
  is_open_ = false;
  include_key(has_scope());
  std::exception_ptr first;
  std::vector<std::function<void(bool)>> now = std::move(at_end_);
  for (const auto& each : now) {
    try {
      each(failed);
    } catch (...) {
      first = first == nullptr ? std::current_exception() : first;
    }
  }
  now.clear();
  if (at_end_.empty()) {
    at_end_.swap(now);  // which keeps its memory
  }
  if (first != nullptr) {
    std::rethrow_exception(first);
  }
}

std::optional<OperationLog::Value::Asked> OperationLog::asked_about(ValueId id, SavedStep& step) const {
  const Value* const value = this->value(id);
  const Value::Asked* const asked = value == nullptr ? nullptr : value->asked();
  const auto pass = asked == nullptr ? nullptr : asked->pass.lock();
  const bool is_asked = pass != nullptr && pass == step.pass().lock();
  return is_asked ? std::optional(*asked) : std::nullopt;
}

bool OperationLog::is_current(ValueId id) const {
  const Value* const value = this->value(id);
  const auto now = value == nullptr ? now_.end() : now_.find(value->storage._unsafe_get_target());
  return now != now_.end() && now->second == id && value->counter.current_version() == value->version;
}

std::shared_ptr<const void> OperationLog::saved(const at::Tensor& tensor, const AutogradInfo& info,
                                                const std::shared_ptr<SavedStorage>& storage) {
  if (!is_tracked(tensor)) {
    return nullptr;
  }
  VersionCheck version(tensor, info);
  version.forget_tensor();  // a recipe may outlive the save
  const auto save = std::make_shared<const Save>(Save{.version = std::move(version),
                                                      .storage = storage,
                                                      .passes_through = storage == nullptr,
                                                      .data = is_managed(tensor) ? nullptr : tensor.storage().data(),
                                                      .is_of_leaf = storage == nullptr && is_of_leaf(tensor, info)});
  const auto is_its_storage = [&](const auto& each) { return each.first.storage().is_alias_of(tensor.storage()); };
  const bool is_written_now = is_open_ && std::ranges::any_of(*written_now_, is_its_storage);
  const ValueId known = is_written_now ? kNoValue : value_of(tensor);
  if (known != kNoValue) {
    values_[known - first_value_].save = save;
  } else if (is_open_) {
    at_end_.insert(at_end_.begin(), [this, tensor, save](bool /*failed*/) {
      if (const ValueId made = value_of(tensor); made != kNoValue && save->version.holds()) {
        values_[made - first_value_].save = save;
      }
    });
  } else {
    values_[add(tensor, kOpaque, /*is_foreign=*/true) - first_value_].save = save;
  }
  return save;
}

// Null where the operation cannot be run again.
std::shared_ptr<LoggedOperation> OperationLog::entry_of(const c10::OperatorHandle& operation,
                                                        const OperatorTraits& traits, DispatchKeySet keys,
                                                        c10::ArrayRef<c10::IValue> arguments) {
  using Again = OperatorTraits::Again;
  if (traits.again == Again::kNo || !at::GradMode::is_enabled() || !opens_entry(traits, keys)) {
    return nullptr;
  }
  auto entry = new_entry(operation);
  entry->traits = traits;
  if (!take_arguments(*entry, arguments) ||
      std::ranges::none_of(entry->tensors, &LoggedOperation::TensorArgument::requires_grad)) {
    take_back(std::move(entry));
    return nullptr;
  }
  const bool on_cuda = keys.has_backend(c10::BackendComponent::CUDABit);
  const auto of_device = std::ranges::find_if(
      entry->tensors, [&](const LoggedOperation::TensorArgument& each) { return each.device.is_cuda() == on_cuda; });
  const bool is_known = of_device != entry->tensors.end();
  const c10::Device device = is_known ? of_device->device : c10::Device(c10::kCPU);
  if (traits.again == Again::kDraws) {
    entry->random_state = is_known ? random_state(device) : std::vector<std::uint8_t>();
    if (entry->random_state.empty()) {
      take_back(std::move(entry));
      return nullptr;
    }
  }
  entry->stream = c10::impl::VirtualGuardImpl(device.type()).getStream(device);
  return entry;
}

OperationLog::Call::Call(OperationLog& log, const c10::OperatorHandle& operation, const OperatorTraits& always,
                         DispatchKeySet keys, const torch::jit::Stack& stack)
    : log_(log), before_(log.first_value_ + log.values_.size()) {
  log_.forget_oldest(kMostOperations, kMostValues);
  const c10::ArrayRef<c10::IValue> arguments = torch::jit::last(stack, operation.schema().arguments().size());
  const OperatorTraits traits = with_arguments(always, arguments);
  for (std::size_t i = 0; traits.written != 0 && i < arguments.size(); ++i) {
    if (traits.may_write_to(i)) {
      for_each_tensor(arguments[i], [&](const at::Tensor& tensor) {
        if (is_tracked(tensor)) {
          const ValueId before = log_.see(tensor);
          written_.emplace_back(tensor, before);
          auto* const of_recipes = log_.values_[before - log_.first_value_].of_recipes.get();
          if (of_recipes != nullptr && of_recipes->before_write != nullptr) {
            std::exchange(of_recipes->before_write, nullptr)(/*is_seen=*/true);
          }
        }
      });
    }
  }
  entry_ = log_.entry_of(operation, traits, keys, arguments);
  if (entry_ != nullptr) {
    log_.written_now_ = &written_;
    log_.open();
  }
}

void OperationLog::Call::end(const torch::jit::Stack& stack, std::size_t returns) {
  has_ended_ = true;
  const bool is_entry = entry_ != nullptr;
  const bool takes_cuda =
      is_entry && std::ranges::any_of(entry_->tensors, [](const auto& each) { return each.device.is_cuda(); });
  const auto place = log_.first_operation_ + log_.operations_.size();
  const auto maker_of = [&](const at::Tensor& tensor) {
    return is_entry && is_plain(tensor) && !(takes_cuda && tensor.is_cpu()) ? place : kOpaque;
  };
  for (const auto& [tensor, before] : written_) {
    const Value* const value = log_.value(before);
    const auto now = log_.now_.find(tensor.storage().unsafeGetStorageImpl());
    if (!is_entry && (now == log_.now_.end() || now->second != before)) {
      continue;  // operations inside have written it
    }
    const bool is_foreign = value == nullptr || value->is_foreign;
    const bool is_resized = value == nullptr || value->bytes != tensor.storage().nbytes();
    const ValueId after = log_.add(tensor, is_foreign || is_resized ? kOpaque : maker_of(tensor), is_foreign);
    for (std::size_t i = 0; is_entry && i < entry_->tensors.size(); ++i) {
      LoggedOperation::TensorArgument& each = entry_->tensors[i];
      each.after = each.value == before ? after : each.after;
    }
  }
  for (const c10::IValue& returned : torch::jit::last(stack, returns)) {
    for_each_tensor(returned, [&](const at::Tensor& tensor) {
      const ValueId known = is_tracked(tensor) ? log_.value_of(tensor) : kNoValue;
      const bool is_new = is_tracked(tensor) && known == kNoValue;
      const ValueId made = is_new ? log_.add(tensor, maker_of(tensor), /*is_foreign=*/false) : kNoValue;
      if (known != kNoValue && known >= before_) {  // first seen in a call inside of this one
        log_.values_[known - log_.first_value_].is_foreign = false;
      }
      if (is_entry) {
        entry_->made.push_back(made);
      }
    });
  }
  if (is_entry) {
    log_.operations_.push_back(std::move(entry_));
    log_.close(/*failed=*/false);
  }
}

OperationLog::Call::~Call() {
  if (has_ended_) {
    return;
  }
  try {
    for (const auto& [tensor, before] : written_) {
      log_.add(tensor, kOpaque, /*is_foreign=*/true);
    }
    if (entry_ != nullptr) {
      log_.close(/*failed=*/true);
    }
  } catch (...) {
    log_warning("what an operation that failed has saved stays on the device");
  }
}

}  // namespace ebb

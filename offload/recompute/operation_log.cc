#include "offload/recompute/operation_log.h"

#include <algorithm>
#include <exception>
#include <mutex>

#include <ATen/Context.h>
#include <ATen/autocast_mode.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "offload/base/autograd_info.h"
#include "offload/base/log.h"
#include "offload/base/managed_key.h"
#include "offload/steps/saved_storage.h"

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

bool is_plain(const at::Tensor& tensor) {
  return tensor.layout() == at::kStrided && !tensor.is_quantized() && !tensor.is_nested() &&
         !tensor.key_set().has_any(kNotPlain) && !tensor.is_inference() && tensor.has_storage() &&
         !tensor.unsafeGetTensorImpl()->has_symbolic_sizes_strides() &&
         tensor.storage().unsafeGetStorageImpl() != nullptr;
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

bool is_as_before(const OperatorTraits& traits, c10::Device device) {
  const at::Context& settings = at::globalContext();
  if (!device.is_cuda() || settings.deterministicAlgorithms()) {
    return true;
  }
  return !traits.may_vary &&
         !(traits.is_convolution && (!settings.deterministicCuDNN() || settings.benchmarkCuDNN()));
}

bool fills_storage(const at::Tensor& tensor) {
  return tensor.storage_offset() == 0 && tensor.is_non_overlapping_and_dense() &&
         tensor.nbytes() == tensor.storage().nbytes();
}

std::vector<std::uint8_t> random_state(c10::Device device) {
  at::Generator generator = at::globalContext().defaultGenerator(device);
  const std::lock_guard lock(generator.mutex());
  const at::Tensor state = generator.get_state();
  const auto* const bytes = state.const_data_ptr<std::uint8_t>();
  return {bytes, bytes + state.numel()};
}

VersionId version_of(const at::Tensor& tensor) { return VersionId(tensor.unsafeGetTensorImpl()->version_counter()); }

struct OfThread {
  std::unique_ptr<OperationLog> log;
};
thread_local OfThread of_thread;

}  // namespace

OperationLog::Scope::Scope()
    : log_([] {
        if (of_thread.log == nullptr) {
          of_thread.log = std::make_unique<OperationLog>();
        }
        return of_thread.log.get();
      }()) {
  if (log_->scopes_++ == 0) {
    log_->forget();
    c10::impl::tls_set_dispatch_key_included(kManagedKey, true);
  }
  here_ = log_;
}

OperationLog::Scope::~Scope() {
  if (log_ != of_thread.log.get() || --log_->scopes_ > 0) {  // ended on another thread: the log goes on
    return;
  }
  c10::impl::tls_set_dispatch_key_included(kManagedKey, false);
  here_ = nullptr;
  log_->forget();
}

void OperationLog::forget() {
  operations_.clear();
  values_.clear();
  now_.clear();
  first_operation_ = 0;
  first_value_ = 0;
  searches_ = 0;
}

void OperationLog::forget_oldest() {
  for (; operations_.size() > kMostOperations; ++first_operation_) {
    operations_.pop_front();
  }
  for (; values_.size() > kMostValues; ++first_value_) {
    const auto now = now_.find(values_.front().storage._unsafe_get_target());
    if (now != now_.end() && now->second == first_value_) {
      now_.erase(now);
    }
    values_.pop_front();
  }
}

ValueId OperationLog::value_of(const at::Tensor& tensor) const {
  const auto known = now_.find(tensor.storage().unsafeGetStorageImpl());
  if (known == now_.end()) {
    return kNoValue;
  }
  const Value& value = values_[known->second - first_value_];
  const VersionId version = version_of(tensor);
  const bool was_written = version.counter == value.version.counter && version.number != value.version.number;
  const bool is_it = !value.storage.expired() && !was_written && value.bytes == tensor.storage().nbytes();
  return is_it ? known->second : kNoValue;
}

ValueId OperationLog::add(const at::Tensor& tensor, std::uint32_t maker) {
  const auto id = first_value_ + static_cast<ValueId>(values_.size());
  values_.push_back({.storage = tensor.storage().getWeakStorageImpl(),
                     .version = version_of(tensor),
                     .bytes = tensor.storage().nbytes(),
                     .maker = maker});
  now_[tensor.storage().unsafeGetStorageImpl()] = id;
  return id;
}

ValueId OperationLog::see(const at::Tensor& tensor) {
  const ValueId known = value_of(tensor);
  return known != kNoValue ? known : add(tensor, kOpaque);
}

// Returns whether the operation can be run again on them.
bool OperationLog::take_arguments(LoggedOperation& entry, c10::ArrayRef<c10::IValue> arguments) {
  bool can_run_again = true;
  const auto take = [&](const at::Tensor& tensor, bool is_written) {
    LoggedOperation::TensorArgument& taken = entry.tensors.emplace_back();
    if (!tensor.defined()) {
      return;
    }
    if (!is_plain(tensor)) {
      can_run_again = false;
      return;
    }
    taken.value = see(tensor);
    taken.bytes = tensor.storage().nbytes();
    taken.dtype = tensor.scalar_type();
    taken.device = tensor.device();
    taken.is_managed = is_managed(tensor);
    taken.requires_grad = tensor.requires_grad();
    taken.is_written = is_written;
    taken.is_filled_anew = is_written && entry.traits.writes_all && fills_storage(tensor);
    taken.offset = tensor.storage_offset();
    taken.sizes.assign(tensor.sizes().begin(), tensor.sizes().end());
    taken.strides.assign(tensor.strides().begin(), tensor.strides().end());
    can_run_again = can_run_again && is_as_before(entry.traits, taken.device) && !(is_written && taken.is_managed);
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
      take(argument.toTensor(), entry.traits.may_write_to(i));
    } else {
      for (const c10::IValue& each : argument.toListRef()) {
        take(each.isTensor() ? each.toTensor() : at::Tensor(), entry.traits.may_write_to(i));
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

void OperationLog::run_at_end() {
  for (const std::function<void()>& each : std::exchange(at_end_, {})) {
    each();
  }
}

bool OperationLog::is_current(ValueId id) const {
  const Value* const value = this->value(id);
  const auto now = value == nullptr ? now_.end() : now_.find(value->storage._unsafe_get_target());
  return now != now_.end() && now->second == id;
}

std::shared_ptr<const void> OperationLog::saved(const at::Tensor& tensor, const AutogradInfo& info,
                                                const std::shared_ptr<SavedStorage>& storage) {
  if (!is_plain(tensor)) {
    return nullptr;
  }
  const bool is_leaf = info.is_leaf() || (info.is_view() && AutogradInfo(tensor._base()).is_leaf());
  const auto save = std::make_shared<const Save>(Save{.version = VersionCheck(tensor, info),
                                                      .storage = storage,
                                                      .passes_through = storage == nullptr,
                                                      .data = is_managed(tensor) ? nullptr : tensor.storage().data(),
                                                      .is_of_leaf = is_leaf && storage == nullptr});
  if (const ValueId known = value_of(tensor); known != kNoValue) {
    values_[known - first_value_].save = save;
  } else if (is_open_) {
    at_end_.insert(at_end_.begin(), [this, tensor, save] {
      if (const ValueId made = value_of(tensor); made != kNoValue && save->version.holds()) {
        values_[made - first_value_].save = save;
      }
    });
  } else {
    values_[add(tensor, kOpaque) - first_value_].save = save;
  }
  return save;
}

OperationLog::Call::Call(OperationLog& log, const c10::OperatorHandle& operation, const OperatorTraits& traits,
                         DispatchKeySet keys, const torch::jit::Stack& stack)
    : log_(log) {
  log_.forget_oldest();
  const c10::ArrayRef<c10::IValue> arguments = torch::jit::last(stack, operation.schema().arguments().size());
  if (traits.written != 0) {
    for (std::size_t i = 0; i < arguments.size(); ++i) {
      if (traits.may_write_to(i)) {
        for_each_tensor(arguments[i], [&](const at::Tensor& tensor) {
          if (tensor.defined() && is_plain(tensor)) {
            written_.emplace_back(tensor, log_.see(tensor));
          }
        });
      }
    }
  }
  if (!opens_entry(traits, keys)) {
    return;
  }
  entry_ = std::make_shared<LoggedOperation>(operation);
  entry_->traits = traits;
  bool can_run_again = log_.take_arguments(*entry_, arguments);
  can_run_again = can_run_again && (traits.again == OperatorTraits::Again::kYes ||
                                    traits.again == OperatorTraits::Again::kDraws);
  const bool on_cuda = keys.has_backend(c10::BackendComponent::CUDABit);
  const auto on_device = std::ranges::find_if(
      entry_->tensors, [&](const LoggedOperation::TensorArgument& each) { return each.device.is_cuda() == on_cuda; });
  const c10::Device device = on_device == entry_->tensors.end() ? c10::Device(c10::kCPU) : on_device->device;
  if (can_run_again && traits.again == OperatorTraits::Again::kDraws) {
    can_run_again = on_device != entry_->tensors.end();
    if (can_run_again) {
      try {
        entry_->random_state = random_state(device);
      } catch (const std::exception&) {  // a stream that is captured tells no state
        can_run_again = false;
      }
    }
  }
  entry_->can_run_again = can_run_again;
  entry_->stream = c10::impl::VirtualGuardImpl(device.type()).getStream(device);
  log_.is_open_ = true;
}

void OperationLog::Call::end(const torch::jit::Stack& stack) {
  has_ended_ = true;
  const auto place = log_.first_operation_ + static_cast<std::uint32_t>(log_.operations_.size());
  const auto maker = entry_ != nullptr && entry_->can_run_again ? place : kOpaque;
  for (auto& [tensor, before] : written_) {
    const Value* const value = log_.value(before);
    const bool is_resized = value == nullptr || value->bytes != tensor.storage().nbytes();
    const auto now = log_.now_.find(tensor.storage().unsafeGetStorageImpl());
    if (entry_ == nullptr && (now == log_.now_.end() || now->second != before)) {
      continue;  // operations inside have written it
    }
    const ValueId after = log_.add(tensor, is_resized ? kOpaque : maker);
    if (entry_ != nullptr) {
      for (LoggedOperation::TensorArgument& each : entry_->tensors) {
        each.after = each.is_written && each.value == before ? after : each.after;
      }
    }
  }
  if (entry_ != nullptr) {
    const std::size_t returns = entry_->operation.schema().returns().size();
    for (const c10::IValue& returned : torch::jit::last(stack, returns)) {
      for_each_tensor(returned, [&](const at::Tensor& tensor) {
        const bool is_new = tensor.defined() && is_plain(tensor) && log_.value_of(tensor) == kNoValue;
        entry_->made.push_back(is_new ? log_.add(tensor, maker) : kNoValue);
      });
    }
    log_.operations_.push_back(std::move(entry_));
    log_.is_open_ = false;
    log_.run_at_end();
  }
}

OperationLog::Call::~Call() {
  if (has_ended_) {
    return;
  }
  for (const auto& [tensor, before] : written_) {
    log_.add(tensor, kOpaque);
  }
  if (entry_ != nullptr) {
    log_.is_open_ = false;
    try {
      log_.run_at_end();
    } catch (const std::exception&) {
      log_warning("what an operation that failed has saved stays on the device");
    }
  }
}

}  // namespace ebb

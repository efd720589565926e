#include "offload/managed/manage.h"

#include <cstdint>
#include <exception>
#include <stdexcept>
#include <string>
#include <string_view>

#include <ATen/ops/clone.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/TensorOptions.h>
#include <c10/util/Exception.h>

#include "offload/base/human_bytes.h"
#include "offload/base/libtorch_members.h"
#include "offload/base/log.h"
#include "offload/base/managed_key.h"
#include "offload/base/references.h"
#include "offload/managed/registry.h"
#include "offload/managed/uses.h"

namespace ebb {
namespace {

constexpr std::string_view kOurs = "ebb: ";  // errors begin so, and the log does by itself

const c10::DispatchKeySet kObserved(kManagedKey);

Registry::Added add(const std::shared_ptr<ManagedSet>& set, const at::Tensor& tensor, const ManagedSet::Slot& slot,
                    Registry::Stays stays = Registry::Stays::kNo) {
  const c10::Device device = set->residency().tier().device();
  if (!tensor.defined() || tensor.layout() != c10::kStrided || tensor.is_nested() || !tensor.has_storage() ||
      tensor.device() != device) {
    throw std::invalid_argument("ebb: only dense tensors on " + device.str() + " can be managed");
  }
  if (!set->takes(tensor)) {
    return Registry::Added::kYes;
  }
  const Registry::Added added = Registry::all().add(tensor.storage(), set, slot, stays);
  if (added == Registry::Added::kYes) {
    key_set_of(tensor) = tensor.key_set() | kObserved;
  }
  return added;
}

void check_room(Registry::Added added, ManagedSet& set, const at::Tensor& tensor) {
  TORCH_CHECK(added != Registry::Added::kNoRoom, "ebb: there is no room for the home of a managed storage of ",
              human_bytes(tensor.storage().nbytes()), ": ",
              set.residency().tier().pool_stats().refusals == 0
                  ? "Options::capacity_bytes is used up"
                  : "the system gives no more memory, or no more of Options::spill_folder's disk");
}

}  // namespace

void manage(const std::shared_ptr<ManagedSet>& set, const at::Tensor& tensor) {
  const Registry::Added added = add(set, tensor, /*slot=*/nullptr);
  check_room(added, *set, tensor);
  TORCH_CHECK(added != Registry::Added::kIsInUse, "ebb: another thread is using a tensor that is to be managed");
}

void manage_around(const std::shared_ptr<ManagedSet>& set, const at::Tensor& tensor) {
  static_cast<void>(add(set, tensor, /*slot=*/nullptr, Registry::Stays::kYes));
}

bool try_to_manage(const std::shared_ptr<ManagedSet>& set, const at::Tensor& tensor, const ManagedSet::Slot& slot) {
  try {
    const Registry::Added added = add(set, tensor, slot);
    if (added == Registry::Added::kIsInUse) {
      return false;
    }
    check_room(added, *set, tensor);
    set->fit();
  } catch (const std::exception& error) {
    if (set->is_first_refusal()) {
      std::string_view why = error.what();
      why = why.substr(0, why.find('\n'));  // without LibTorch's backtrace
      why.remove_prefix(why.starts_with(kOurs) ? kOurs.size() : 0);
      log_warning("gradients or optimizer states stay on the device: " + std::string(why));
    }
  }
  return true;
}

void manage_beside(const at::Tensor& parameter, const at::Tensor& state) {
  const std::shared_ptr<ManagedSet> set = Registry::all().find(parameter).set;
  if (set != nullptr && set->takes_states() && set->takes(state) && !is_managed(state) &&
      references_to(state.storage()) == 1) {
    try_to_manage(set, state);
    Registry::all().belongs_to(state.storage().unsafeGetStorageImpl(), parameter.storage());
  }
}

ManagedCopy copy_beside(const at::Tensor& parameter, const at::Tensor& from) {
  const std::shared_ptr<ManagedSet> set = Registry::all().find(parameter).set;
  if (set == nullptr || !set->takes(from)) {
    return {};
  }
  ManagedCopy copy;
  try {
    const c10::InferenceMode no_inference(false);
    copy.tensor = from.detach().clone(at::MemoryFormat::Contiguous);
  } catch (const c10::OutOfMemoryError&) {
    return {};
  }
  if (add(set, copy.tensor, set->make_slot()) != Registry::Added::kYes) {
    return {};
  }
  // The weak reference keeps the address from being used again.
  copy.home = {nullptr, [set, managed = Registry::all().find(copy.tensor).managed,
                         storage = copy.tensor.storage().getWeakStorageImpl()](const void* /*none*/) {
                 if (!set->residency().forked()) {
                   Registry::all().remove(storage._unsafe_get_target());
                   set->remove(managed);
                 }
               }};
  set->fit();
  return copy;
}

void release(const std::shared_ptr<ManagedSet>& set, at::TensorList tensors) {
  for (const c10::Storage& storage : Registry::all().with_states_of(tensors, *set)) {
    const at::Tensor bytes = bytes_of(storage);
    const Uses use(bytes);  // after what was put off
    if (const auto managed = Registry::all().find(bytes).managed) {
      managed->release();
      set->remove(managed);
    }
    Registry::all().remove(storage.unsafeGetStorageImpl());
  }
  for (const at::Tensor& each : tensors) {
    if (each.has_storage() && Registry::all().find(each.storage().unsafeGetStorageImpl()).set == nullptr) {
      key_set_of(each) = each.key_set() - kObserved;
    }
  }
}

bool has_home(const at::Tensor& tensor) { return Registry::all().find(tensor).managed != nullptr; }

at::Tensor bytes_of(const c10::Storage& storage) {
  c10::DispatchKeySet keys(c10::computeDispatchKey(c10::kByte, c10::kStrided, storage.device()));
  if (Registry::all().find(storage.unsafeGetStorageImpl()).managed != nullptr) {
    keys = keys | kObserved;
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

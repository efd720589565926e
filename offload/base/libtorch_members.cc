#include "offload/base/libtorch_members.h"

namespace ebb {
namespace {

// A pointer to a private member can be named in an explicit instantiation only, which then defines the key's member().
template <typename Key, auto Member>
struct Shown {
  friend constexpr auto member(Key /*key*/) { return Member; }
};

struct RefusesAll {
  friend constexpr auto member(RefusesAll /*key*/);
};
template struct Shown<RefusesAll, &c10::StorageImpl::throw_on_immutable_data_ptr_>;

struct RefusesWrites {
  friend constexpr auto member(RefusesWrites /*key*/);
};
template struct Shown<RefusesWrites, &c10::StorageImpl::throw_on_mutable_data_ptr_>;

struct KeySet {
  friend constexpr auto member(KeySet /*key*/);
};
template struct Shown<KeySet, &c10::TensorImpl::key_set_>;

struct Counter {
  friend constexpr auto member(Counter /*key*/);
};
template struct Shown<Counter, &c10::VariableVersion::version_counter_>;
static_assert(sizeof(c10::VariableVersion) == sizeof(void*));  // a version has nothing but its counter

}  // namespace

Refusals refusals_of(c10::StorageImpl& storage) {
  return {storage.*member(RefusesAll()), storage.*member(RefusesWrites())};
}

c10::DispatchKeySet& key_set_of(const at::TensorBase& tensor) {
  return tensor.unsafeGetTensorImpl()->*member(KeySet());
}

const void* counter_of(const c10::VariableVersion& version) { return (version.*member(Counter())).get(); }

}  // namespace ebb

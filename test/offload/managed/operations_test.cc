// How operations on managed tensors are observed: what operators do, and operations inside of others.

#include <cstddef>
#include <cstdint>
#include <future>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <catch2/catch.hpp>
#include <torch/library.h>

#include "offload/base/operator_traits.h"
#include "offload/managed/manage.h"
#include "offload/managed/managed_set.h"
#include "offload/managed/observed_operations.h"
#include "offload/managed/postpone.h"
#include "offload/managed/uses.h"
#include "offload/recording/use_log.h"
#include "test/offload/cache/ordering_world.h"
#include "test/offload/managed/managed_helpers.h"
#include "test/offload/rig.h"

namespace ebb {
namespace {

using test::is_away;
using test::OrderingWorld;
using test::within;

constexpr std::int64_t kFloats = 256;

// Operators in a namespace of LibTorch's own, whose schemas are believed.
torch::Library fragment() { return {torch::Library::FRAGMENT, "prims", std::nullopt, __FILE__, __LINE__}; }

c10::OperatorHandle operator_of(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow((std::string("prims::") + name).c_str(), "");
}

at::Tensor call(const char* name, const at::Tensor& tensor) {
  return operator_of(name).typed<at::Tensor(const at::Tensor&)>().call(tensor);
}

TEST_CASE("an operator's traits are those of its schema, also of a later one of the same name", "[managed]") {
  const auto traits_of = [](const char* name, const char* overload) {
    return OperatorTraits::of(c10::Dispatcher::singleton().findSchemaOrThrow(name, overload));
  };
  using Kind = OperatorTraits::Kind;
  CHECK(traits_of("aten::mm", "").kind == Kind::kUsesBytes);
  CHECK(traits_of("aten::mm", "").written == 0);
  CHECK(traits_of("aten::add_", "Tensor").written == 1);
  CHECK(traits_of("aten::record_stream", "").written == 0);
  CHECK(traits_of("aten::native_batch_norm", "").may_write_to(3));
  CHECK(traits_of("aten::view", "").kind == Kind::kUsesNoBytes);
  CHECK(traits_of("aten::empty_like", "").kind == Kind::kUsesNoBytes);
  CHECK(traits_of("aten::tensor_split", "tensor_indices_or_sections").kind == Kind::kUsesBytes);
  CHECK(traits_of("aten::zeros_like", "").kind == Kind::kMakesAlike);
  CHECK(traits_of("aten::_foreach_mul_", "Scalar").kind == Kind::kPlaceByPlace);
  CHECK(traits_of("aten::_foreach_addcmul_", "Tensor").kind == Kind::kUsesBytes);
  for (const bool writes : {true, false, true}) {
    torch::Library library = fragment();
    library.def(writes ? "ebb_again(Tensor(a!) x) -> ()" : "ebb_again(Tensor x) -> ()");
    CHECK(OperatorTraits::of(operator_of("ebb_again")).written == (writes ? 1 : 0));
  }
}

TEST_CASE("what an operation inside of another writes is kept", "[managed]") {
  Rig rig(disk());
  torch::Library library = fragment();
  library.def("ebb_writes_inside(Tensor x) -> Tensor", [](const at::Tensor& x) {
    x.detach().add_(1);
    return x.sum();
  });
  const at::Tensor managed = at::ones({kFloats});
  const at::Tensor other = at::ones({kFloats});
  rig.offloader().manage({managed, other}, within(0));
  CHECK(call("ebb_writes_inside", managed).item<float>() == 2 * kFloats);
  CHECK(other.sum().item<float>() == kFloats);  // sends the first one home
  CHECK(is_away(managed));
  CHECK(managed.sum().item<float>() == 2 * kFloats);
}

void triple(const std::vector<at::Tensor>& tensors, bool /*has_target*/) { tensors.front().mul_(3); }

TEST_CASE("work that is put off inside of an operation is done before the next operation there", "[managed]") {
  Rig rig(disk());
  torch::Library library = fragment();
  library.def("ebb_postpones_inside(Tensor x) -> Tensor", [](const at::Tensor& x) {
    CHECK(postpone(x, {}, &triple) != nullptr);
    return x.sum();
  });
  const at::Tensor managed = at::ones({kFloats});
  rig.offloader().manage({managed}, within(0));
  CHECK(call("ebb_postpones_inside", managed).item<float>() == 3 * kFloats);
  const Uses here(managed);
  REQUIRE(postpone(managed, {}, &triple) != nullptr);
  CHECK(managed.sum().item<float>() == 9 * kFloats);
}

// A set whose log tells how often operations have used its storages.
class LoggingWorld : public OrderingWorld {
 public:
  LoggingWorld() : OrderingWorld(Schedule::kEarly, 0, {}) {
    ManagedSet::Limits limits;
    limits.device_bytes = std::uint64_t{1} << 30;
    set_ = std::make_shared<ManagedSet>(runtime->shared_residency(), runtime->steps(), limits);
    log_ = std::make_shared<UseLog>();
    set_->log_to(log_);
  }

  at::Tensor managed() {
    observe_operations();
    at::Tensor made = at::ones({8, 8});
    manage(set_, made);
    return made;
  }

  template <typename Program>
  std::size_t uses_of(const Program& program) {
    log_->step_begins();
    log_->backward_begins();
    program();
    log_->backward_is_over(/*failed=*/false);
    log_->step_begins();
    return log_->last_period()->size();
  }

 private:
  std::shared_ptr<ManagedSet> set_;
  std::shared_ptr<UseLog> log_;
};

TEST_CASE("operations inside of another are no uses of their own", "[managed]") {
  LoggingWorld world;
  const at::Tensor a = world.managed();
  const at::Tensor b = world.managed();
  CHECK(world.uses_of([&] { at::mm(a, b); }) == 2);
  CHECK(world.uses_of([&] { at::matmul(a, b); }) == 2);  // calls mm
  CHECK(world.uses_of([&] { at::mm(a, b).add_(a).add_(b); }) == 4);
  CHECK(world.uses_of([&] {
    const Uses here(/*read=*/{a, b}, /*written=*/{});
    at::mm(a, b).add_(a).add_(b);
  }) == 2);
  CHECK(world.uses_of([&] {
    const Uses here(a);
    at::mm(a, b);
    std::async(std::launch::async, [&] { a.sum(); }).get();
  }) == 3);
}

}  // namespace
}  // namespace ebb

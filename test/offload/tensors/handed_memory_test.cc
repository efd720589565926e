// Memory that ebb hands to the program is the allocator's own: LibTorch knows its memory by the deleter, and
// record_stream ignores all other memory, silently. On a GPU gpu_record_stream_test.cc shows what that would do.

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <catch2/catch.hpp>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>

#include "policy/policies.h"
#include "test/checked/checked_tier.h"
#include "test/offload/parity.h"

namespace ebb {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;

struct ShowsMemory : Function<ShowsMemory> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, c10::DeleterFnPtr* deleter) {
    context->save_for_backward({x});
    context->saved_data["deleter"] = reinterpret_cast<std::int64_t>(deleter);
    return x * 2;
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const at::Tensor x = context->get_saved_variables()[0];
    *reinterpret_cast<c10::DeleterFnPtr*>(context->saved_data["deleter"].toInt()) =
        x.storage().data_ptr().get_deleter();
    // A storage that LibTorch made may be resized.
    x.storage().unsafeGetStorageImpl()->allocator();
    TORCH_CHECK(x.storage().resizable());
    return {gradients[0] * 2, at::Tensor()};
  }
};

c10::DeleterFnPtr deleter_of_use(Rig& rig, bool computed) {
  c10::DeleterFnPtr found = nullptr;
  Inputs in;
  at::Tensor loss;
  {
    const OffloadGuard guard(rig.offloader());
    const at::Tensor x = in.activation({64});
    loss = ShowsMemory::apply(computed ? at::silu(x) : x, &found).sum();
  }
  loss.backward();
  return found;
}

TEST_CASE_METHOD(NoLeak, "what was fetched is the tier's memory as it was allocated") {
  Rig rig(late_without_stash());
  const c10::DeleterFnPtr expected = checked(make_tier(late()))->allocate(64).get_deleter();
  CHECK(deleter_of_use(rig, false) == expected);
  CHECK(rig.stats().fetched.tensors >= 1);
}

TEST_CASE_METHOD(NoLeak, "what was recomputed is the operation's memory as it was allocated") {
  Setting setting = late();
  setting.options.policy = recompute();
  Rig rig(setting);
  const c10::DeleterFnPtr expected = at::empty({64}).storage().data_ptr().get_deleter();
  static_cast<void>(deleter_of_use(rig, true));  // proves the recipe
  CHECK(deleter_of_use(rig, true) == expected);
  CHECK(rig.stats().recomputed.tensors == 1);
}

}  // namespace
}  // namespace ebb

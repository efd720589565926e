#include "offload/managed/observed_operations.h"

#include <algorithm>
#include <cstddef>
#include <memory>

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/util/ArrayRef.h>
#include <torch/library.h>

#include "offload/base/backward_pass.h"
#include "offload/base/log.h"
#include "offload/base/managed_key.h"
#include "offload/base/operator_traits.h"
#include "offload/managed/collective.h"
#include "offload/managed/in_parts.h"
#include "offload/managed/manage.h"
#include "offload/managed/uses.h"
#include "offload/optimizer_step.h"
#include "offload/recompute/operation_log.h"

namespace ebb {
namespace {

using Kind = OperatorTraits::Kind;

// Has what was made like another tensor be managed where it is a state, and not for an operation, a model or backward.
void manage_if_state(const at::Tensor& like, const at::Tensor& made) {
  if (at::GradMode::is_enabled() || in_backward() || Uses::is_open()) {
    return;
  }
  if (OptimizerStep::steps(like)) {
    manage_beside(like, made);
  } else if (like.requires_grad() && like.is_leaf() && !OptimizerStep::is_known()) {
    [[maybe_unused]] static const bool said = [] {
      log_warning(
          "what the program makes like a managed parameter stays on the device. If an optimizer makes its states so, "
          "put an ebb::OptimizerStep around step(), and the states are managed, too");
      return true;
    }();
  }
}

bool has_managed(c10::ArrayRef<c10::IValue> arguments) {
  return std::ranges::any_of(arguments, [](const c10::IValue& argument) {
    if (argument.isTensor()) {
      return argument.toTensor().defined() && is_managed(argument.toTensor());
    }
    if (!argument.isTensorList() && !argument.isOptionalTensorList()) {
      return false;
    }
    return std::ranges::any_of(argument.toListRef(), [](const c10::IValue& each) {
      return each.isTensor() && each.toTensor().defined() && is_managed(each.toTensor());
    });
  });
}

template <typename GoOn>
void run_on_managed(const c10::OperatorHandle& operation, const OperatorTraits& traits, torch::jit::Stack* stack,
                    const GoOn& go_on) {
  const std::size_t count = operation.schema().arguments().size();
  if (traits.kind == Kind::kMakesAlike) {
    const c10::IValue like = torch::jit::peek(*stack, 0, count);
    go_on();
    if (const c10::IValue& made = torch::jit::peek(*stack, 0, 1); like.isTensor() && made.isTensor()) {
      manage_if_state(like.toTensor(), made.toTensor());
    }
    return;
  }
  if (traits.kind == Kind::kPlaceByPlace && run_in_parts(operation, *stack)) {
    return;
  }
  const auto run = [&](Uses& uses) {
    uses.add_all(torch::jit::last(*stack, count), traits);
    uses.bring();
    go_on();
  };
  if (traits.kind == Kind::kCollective) {
    const auto uses = std::make_shared<Uses>(Uses::Outer::kOwn);
    run(*uses);
    uses->leave();
    end_with_works(torch::jit::last(*stack, operation.schema().returns().size()),
                   uses->are_on_a_cpu() ? uses : nullptr);
    return;
  }
  Uses uses;
  run(uses);
}

void observe(const c10::OperatorHandle& operation, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const OperatorTraits traits = OperatorTraits::of(operation);
  const auto go_on = [&] {
    operation.redispatchBoxed(keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kManagedKey), stack);
  };
  const auto run = [&] {
    const auto arguments = torch::jit::last(*stack, operation.schema().arguments().size());
    if (traits.kind == Kind::kUsesNoBytes || !has_managed(arguments)) {
      go_on();
    } else {
      run_on_managed(operation, traits, stack, go_on);
    }
  };
  OperationLog* const log = OperationLog::here();
  if (log != nullptr && !log->has_scope()) {
    OperationLog::stop_here();
  } else if (log != nullptr && !log->is_open() && !traits.makes_views && !in_backward()) {
    OperationLog::Call call(*log, operation, traits, keys, *stack);
    run();
    call.end(*stack, operation.schema().returns().size());
    return;
  }
  run();
}

}  // namespace

void observe_operations() {
  [[maybe_unused]] static const auto* const library = [] {  // for ever
    auto made = std::make_unique<torch::Library>(torch::Library::IMPL, "_", kManagedKey, __FILE__, __LINE__);
    made->fallback(torch::CppFunction::makeFromBoxedFunction<&observe>());
    return made.release();
  }();
  [[maybe_unused]] static const auto* const of_views = [] {  // what composite ones call is observed
    auto made = std::make_unique<torch::Library>(torch::Library::IMPL, "aten", kManagedKey, __FILE__, __LINE__);
    c10::Dispatcher& dispatcher = c10::Dispatcher::singleton();
    for (const c10::OperatorName& name : dispatcher.getAllOpNames()) {
      const auto operation = dispatcher.findSchema(name);
      if (operation && name.getNamespace() == "aten" && only_makes_views(operation->schema())) {
        made->impl(c10::toString(name).c_str(), torch::CppFunction::makeFallthrough());
      }
    }
    return made.release();
  }();
}

}  // namespace ebb

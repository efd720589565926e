#include "offload/autograd/engine.h"

#include <atomic>
#include <memory>
#include <mutex>
#include <utility>

#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/autograd/engine.h>

#include "offload/autograd/forwarding_engine.h"
#include "offload/autograd/guard_scope.h"
#include "offload/autograd/region.h"
#include "offload/autograd/save_hook.h"
#include "offload/backward.h"

namespace ebb {
namespace {

using torch::autograd::Engine;

// Whether make_fx or torch.compile writes the thread's operations down. A tracer knows tensors by identity, and takes
// what an unpack hands out for a constant; and the fake tensors that it runs a function with are no saves of the
// function.
bool is_traced() {
  using c10::impl::TorchDispatchModeKey;
  using c10::impl::TorchDispatchModeTLS;
  return TorchDispatchModeTLS::any_modes_set() &&
         (TorchDispatchModeTLS::get_mode(TorchDispatchModeKey::PROXY).has_value() ||
          TorchDispatchModeTLS::get_mode(TorchDispatchModeKey::FAKE).has_value());
}

class AskingEngine final : public ForwardingEngine {
 public:
  using ForwardingEngine::ForwardingEngine;

  std::unique_ptr<torch::autograd::SavedVariableHooks> get_default_saved_variable_hooks() override {
    if (is_traced()) {
      return ForwardingEngine::get_default_saved_variable_hooks();
    }
    if (auto hook = Region::hook_here()) {
      return hook;
    }
    GuardScope::Target target = GuardScope::current();
    if (target.runtime == nullptr) {
      return ForwardingEngine::get_default_saved_variable_hooks();
    }
    return std::make_unique<SaveHook>(std::move(target));
  }

  torch::autograd::variable_list execute(const torch::autograd::edge_list& roots,
                                         const torch::autograd::variable_list& inputs, bool keep_graph,
                                         bool create_graph, bool accumulate_grad,
                                         const torch::autograd::edge_list& outputs) override {
    const Backward backward;
    return ForwardingEngine::execute(roots, inputs, keep_graph, create_graph, accumulate_grad, outputs);
  }
};

std::atomic<Engine*> installed{nullptr};

}  // namespace

void install_engine() {
  static std::once_flag once;
  std::call_once(once, [] {
    installed = new AskingEngine(Engine::get_default_engine());  // Note [An engine that forwards]
    torch::autograd::set_default_engine_stub([]() -> Engine& { return *installed; });
  });
}

}  // namespace ebb

#include "offload/autograd/engine.h"

#include <atomic>
#include <exception>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/autograd/anomaly_mode.h>
#include <torch/csrc/autograd/engine.h>

#include "offload/autograd/guard_scope.h"
#include "offload/autograd/save_hook.h"
#include "offload/backward.h"
#include "offload/base/libtorch.h"

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

class AskingEngine final : public Engine {
 public:
  explicit AskingEngine(Engine& next) : next_(next) {}

  std::unique_ptr<torch::autograd::SavedVariableHooks> get_default_saved_variable_hooks() override {
    if (is_traced()) {
      return next_.get_default_saved_variable_hooks();
    }
    GuardScope::Target target = GuardScope::current();
    std::unique_ptr<torch::autograd::SavedVariableHooks> hook;
    if (const auto run = std::exchange(target.run, nullptr)) {
      hook = (*run)(std::move(target));
    } else if (target.runtime != nullptr) {
      hook = std::make_unique<SaveHook>(std::move(target));
    }
    return hook != nullptr ? std::move(hook) : next_.get_default_saved_variable_hooks();
  }

  torch::autograd::variable_list execute(const torch::autograd::edge_list& roots,
                                         const torch::autograd::variable_list& inputs, bool keep_graph,
                                         bool create_graph, bool accumulate_grad,
                                         const torch::autograd::edge_list& outputs) override {
    const Backward backward;
    return next_.execute(roots, inputs, keep_graph, create_graph, accumulate_grad, outputs);
  }

  c10::intrusive_ptr<at::ivalue::Future> execute_with_graph_task(
      const std::shared_ptr<torch::autograd::GraphTask>& graph_task, NodePtr graph_root,
      torch::autograd::InputBuffer&& input_buffer) override {
    return next_.execute_with_graph_task(graph_task, std::move(graph_root), std::move(input_buffer));
  }

#ifdef EBB_HAS_NODE_CREATION_HOOKS
  std::vector<std::unique_ptr<torch::autograd::NodeCreationHook>> get_node_creation_hooks() override {
    return next_.get_node_creation_hooks();
  }
#endif

  std::unique_ptr<torch::autograd::AnomalyMetadata> make_anomaly_metadata() override {
    return next_.make_anomaly_metadata();
  }

  void thread_on_exception(const std::shared_ptr<torch::autograd::GraphTask>& graph_task, const NodePtr& node,
                           std::exception& error) override {
    next_.thread_on_exception(graph_task, node, error);
  }

  void thread_init(int device, const std::shared_ptr<torch::autograd::ReadyQueue>& queue,
                   bool should_increment) override {
    next_.thread_init(device, queue, should_increment);
  }

 private:
  Engine& next_;  // lives for ever, as every default engine does
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

#include "offload/engine.h"

#include <memory>
#include <mutex>
#include <optional>
#include <utility>

#include <torch/csrc/autograd/engine.h>

#include "offload/early_fetch.h"
#include "offload/lent_tensor.h"
#include "offload/region.h"
#include "offload/save_hook.h"
#include "offload/scope.h"

namespace ebb {
namespace {

// Note [Device threads of a second engine]
// An engine starts its threads at its first backward, but behind a once_flag that all engines of the process share:
// where LibTorch's own engine has run before, ours would find itself without threads for the GPUs and for reentrant
// backwards. So the flag is used up by LibTorch's engine, and ours starts its own threads.
class GuardedEngine final : public torch::autograd::Engine {
 public:
  GuardedEngine() {
    get_base_engine().initialize_device_threads_pool();
    start_device_threads();
  }

  std::unique_ptr<torch::autograd::SavedVariableHooks> get_default_saved_variable_hooks() override {
    if (auto hook = Region::hook_here()) {
      return hook;
    }
    Scope::Target target = Scope::current();
    return target.core == nullptr ? nullptr : std::make_unique<SaveHook>(std::move(target));
  }

  torch::autograd::variable_list execute(const torch::autograd::edge_list& roots,
                                         const torch::autograd::variable_list& inputs, bool keep_graph,
                                         bool create_graph, bool accumulate_grad,
                                         const torch::autograd::edge_list& outputs) override {
    const LendingPass lending;
    std::optional<EarlyFetch> early;
    if (!in_backward()) {
      early.emplace();
    }
    return Engine::execute(roots, inputs, keep_graph, create_graph, accumulate_grad, outputs);
  }
};

torch::autograd::Engine& the_engine() {
  static auto* const engine = new GuardedEngine;  // Note [An engine of our own]
  return *engine;
}

}  // namespace

void install_engine() {
  static std::once_flag once;
  std::call_once(once, [] { torch::autograd::set_default_engine_stub(&the_engine); });
}

int backward_here() { return torch::autograd::get_current_graph_task_id(); }

}  // namespace ebb

// Beside an autograd engine of the program's own, which is what Python's is.

#include <memory>
#include <string>

#include <ATen/Functions.h>
#include <torch/csrc/autograd/anomaly_mode.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/saved_variable_hooks.h>

#include "offload/guard.h"
#include "offload/offloader.h"
#include "test/process/modes.h"
#include "test/process/world.h"

namespace ebb {
namespace {

using torch::autograd::AnomalyMetadata;
using torch::autograd::Engine;
using torch::autograd::SavedVariableHooks;
using torch::autograd::variable_list;

class ProgramsHook final : public SavedVariableHooks {
 public:
  void call_pack_hook(const at::Tensor& tensor) override { packed_ = tensor.detach(); }
  at::Tensor call_unpack_hook() override { return packed_; }

 private:
  at::Tensor packed_;
};

class ProgramsEngine final : public Engine {
 public:
  std::unique_ptr<SavedVariableHooks> get_default_saved_variable_hooks() override {
    ++saves;
    return std::make_unique<ProgramsHook>();
  }

  std::unique_ptr<AnomalyMetadata> make_anomaly_metadata() override {
    ++nodes;
    return Engine::make_anomaly_metadata();
  }

  variable_list execute(const torch::autograd::edge_list& roots, const variable_list& inputs, bool keep_graph,
                        bool create_graph, bool accumulate_grad, const torch::autograd::edge_list& outputs) override {
    ++backwards;
    return Engine::execute(roots, inputs, keep_graph, create_graph, accumulate_grad, outputs);
  }

  int saves = 0;
  int nodes = 0;
  int backwards = 0;
};

ProgramsEngine& programs_engine() {
  static auto* const engine = new ProgramsEngine;  // never stopped: Python's is not either
  return *engine;
}

void say_step(const std::string& where, bool anomaly_mode = false) {
  ProgramsEngine& engine = programs_engine();
  engine.saves = engine.nodes = engine.backwards = 0;
  torch::autograd::AnomalyMode::set_enabled(anomaly_mode);
  const at::Tensor leaf = at::full({kSmall}, 0.5F).requires_grad_();
  forward(leaf).backward();
  torch::autograd::AnomalyMode::set_enabled(false);
  const auto asked = [](int count) { return std::string(count > 0 ? "yes" : "no"); };
  say(where + ": hooks " + asked(engine.saves) + ", metadata " + asked(engine.nodes) + ", backward " +
      asked(engine.backwards));
}

void engine_of_program() {
  torch::autograd::set_default_engine_stub([]() -> Engine& { return programs_engine(); });
  say_step("before");
  Offloader offloader(everything(at::kCPU));
  say_step("outside");
  {
    const OffloadGuard guard(offloader);
    say_step("guarded");
    say_step("guarded", /*anomaly_mode=*/true);
    const NoOpGuard kept;
    say_step("left to LibTorch");
  }
  const Stats stats = offloader.stats();
  say(stats.offloaded.tensors > 0 && stats.pool.now_bytes == 0 ? "moved" : "not moved");
}

}  // namespace

const Modes kEngineModes{
    {"engine_of_program", engine_of_program},
};

}  // namespace ebb

#include "bench/overhead/default_hooks.h"

#include <atomic>
#include <memory>

#include <c10/util/Exception.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/saved_variable_hooks.h>

namespace ebb {
namespace {

using torch::autograd::Engine;
using torch::autograd::SavedVariableHooks;

class IdleHook final : public SavedVariableHooks {
 public:
  void call_pack_hook(const at::Tensor& tensor) override { saved_ = tensor; }
  at::Tensor call_unpack_hook() override { return saved_; }

 private:
  at::Tensor saved_;
};

class LeastHook final : public SavedVariableHooks {
 public:
  void call_pack_hook(const at::Tensor& tensor) override {
    saved_ = tensor.is_leaf() ? tensor : tensor.tensor_data();
    counter_ = tensor.unsafeGetTensorImpl()->version_counter();
    version_ = counter_.current_version();
  }

  at::Tensor call_unpack_hook() override {
    TORCH_CHECK(counter_.current_version() == version_, "a saved tensor has been written to");
    return saved_;
  }

 private:
  at::Tensor saved_;
  c10::VariableVersion counter_{c10::VariableVersion::DISABLED};
  std::uint32_t version_ = 0;
};

template <class Hook>
class HookEngine final : public Engine {
 public:
  // Leaked, as ebb's.
  static Engine& get() {
    static auto* const engine = new HookEngine;
    return *engine;
  }

  std::unique_ptr<SavedVariableHooks> get_default_saved_variable_hooks() override { return std::make_unique<Hook>(); }
};

Engine& engine_of(DefaultHooks which) {
  switch (which) {
    case DefaultHooks::kIdle:
      return HookEngine<IdleHook>::get();
    case DefaultHooks::kLeast:
      return HookEngine<LeastHook>::get();
    case DefaultHooks::kNone:
      break;
  }
  return Engine::get_base_engine();
}

std::atomic<Engine*> engine_in_force{nullptr};

// LibTorch asks this function at each save, and does not tell which one it asked before.
void install(Engine& engine) {
  engine_in_force = &engine;
  torch::autograd::set_default_engine_stub([]() -> Engine& { return *engine_in_force.load(); });
}

}  // namespace

DefaultHooksInForce::DefaultHooksInForce(DefaultHooks which) : before_(Engine::get_default_engine()) {
  install(engine_of(which));
}

DefaultHooksInForce::~DefaultHooksInForce() { install(before_); }

}  // namespace ebb

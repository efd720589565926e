#include "test/random/foreign_hooks.h"

#include <map>
#include <mutex>
#include <utility>

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include "offload/autograd/engine.h"

namespace ebb::graphs {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::edge_list;
using torch::autograd::Engine;
using torch::autograd::SavedVariableHooks;
using torch::autograd::variable_list;

ForeignHooks*& innermost() {
  thread_local ForeignHooks* here = nullptr;
  return here;
}

// Has ebb's engine do all else that a program without Python asks the default engine for.
class ForeignEngine final : public Engine {
 public:
  explicit ForeignEngine(Engine& next) : next_(next) {}

  std::unique_ptr<SavedVariableHooks> get_default_saved_variable_hooks() override {
    return innermost() == nullptr ? next_.get_default_saved_variable_hooks() : innermost()->make();
  }

  variable_list execute(const edge_list& roots, const variable_list& inputs, bool keep_graph, bool create_graph,
                        bool accumulate_grad, const edge_list& outputs) override {
    return next_.execute(roots, inputs, keep_graph, create_graph, accumulate_grad, outputs);
  }

 private:
  Engine& next_;
};

void install_foreign_engine() {
  static Engine* engine = nullptr;
  static std::once_flag once;
  std::call_once(once, [] {
    install_engine();
    engine = new ForeignEngine(Engine::get_default_engine());
    torch::autograd::set_default_engine_stub([]() -> Engine& { return *engine; });
  });
}

// How a hook keeps a tensor and gives it back.
enum class How : std::uint8_t { kCopies, kOnce, kRaises, kComputes };
constexpr std::uint32_t kHows = 4;

class CopyingHook final : public SavedVariableHooks {
 public:
  CopyingHook(How how, std::shared_ptr<Calls> calls) : how_(how), calls_(std::move(calls)) {}

  void call_pack_hook(const at::Tensor& tensor) override {
    ++calls_->packs;
    const at::NoGradGuard no_grad;
    held_ = how_ == How::kComputes ? tensor.detach().neg() : tensor.detach().clone();
  }

  at::Tensor call_unpack_hook() override {
    ++calls_->unpacks;
    TORCH_CHECK(how_ != How::kRaises, "a hook of the program's raises");
    if (how_ == How::kOnce) {
      TORCH_CHECK(held_.defined(), "a hook of the program's is asked twice");
      return std::exchange(held_, {});
    }
    const at::NoGradGuard no_grad;
    return how_ == How::kComputes ? held_.neg() : held_;
  }

 private:
  const How how_;
  const std::shared_ptr<Calls> calls_;
  at::Tensor held_;
};

class CopyingHooks final : public ForeignHooks {
 public:
  CopyingHooks(How how, std::shared_ptr<Calls> calls) : how_(how), calls_(std::move(calls)) {}
  std::unique_ptr<SavedVariableHooks> make() override { return std::make_unique<CopyingHook>(how_, calls_); }

 private:
  const How how_;
  const std::shared_ptr<Calls> calls_;
};

// Takes what a region's second run saves.
class Collecting final : public ForeignHooks {
 public:
  std::unique_ptr<SavedVariableHooks> make() override { return std::make_unique<Hook>(saved_); }
  [[nodiscard]] const Tensors& saved() const { return *saved_; }

 private:
  class Hook final : public SavedVariableHooks {
   public:
    explicit Hook(std::shared_ptr<Tensors> saved) : saved_(std::move(saved)) {}
    void call_pack_hook(const at::Tensor& tensor) override { saved_->push_back(tensor.detach()); }
    at::Tensor call_unpack_hook() override { TORCH_CHECK(false, "a second run has no backward"); }

   private:
    const std::shared_ptr<Tensors> saved_;
  };
  const std::shared_ptr<Tensors> saved_ = std::make_shared<Tensors>();
};

Tensors detached(const Tensors& inputs) {
  Tensors leaves;
  for (const at::Tensor& input : inputs) {
    leaves.push_back(input.detach().requires_grad_(input.requires_grad()));
  }
  return leaves;
}

// One call of checkpoint_by_hooks. What backward asks for first has the function run again; each save of that run is
// given out once to each backward pass.
class Frame {
 public:
  Frame(RegionFunction function, Tensors inputs, std::shared_ptr<Calls> calls)
      : function_(std::move(function)), inputs_(std::move(inputs)), calls_(std::move(calls)) {}

  std::size_t add() { return saves_++; }

  at::Tensor take(std::size_t place) {
    const std::lock_guard lock(mutex_);
    const int pass = torch::autograd::get_current_graph_task_id();
    auto made = made_.find(pass);
    if (made == made_.end()) {
      made = made_.emplace(pass, run_again()).first;
    }
    TORCH_CHECK(place < made->second.size(), "the second run saved fewer tensors");
    at::Tensor taken = std::exchange(made->second[place], {});
    TORCH_CHECK(taken.defined(), "a checkpointed tensor is asked for twice");
    return taken;
  }

 private:
  Tensors run_again() {
    ++calls_->runs;
    const at::AutoGradMode gradients(true);
    Collecting collecting;
    const ForeignScope scope(&collecting);
    static_cast<void>(function_(detached(inputs_)));
    return collecting.saved();
  }

  const RegionFunction function_;
  const Tensors inputs_;
  const std::shared_ptr<Calls> calls_;
  std::atomic<std::size_t> saves_{0};
  std::mutex mutex_;
  std::map<int, Tensors> made_;  // by backward pass
};

class FrameHook final : public SavedVariableHooks {
 public:
  explicit FrameHook(std::shared_ptr<Frame> frame) : frame_(std::move(frame)) {}
  void call_pack_hook(const at::Tensor& /*tensor*/) override { place_ = frame_->add(); }
  at::Tensor call_unpack_hook() override { return frame_->take(place_); }

 private:
  const std::shared_ptr<Frame> frame_;
  std::size_t place_ = 0;
};

class FrameHooks final : public ForeignHooks {
 public:
  explicit FrameHooks(std::shared_ptr<Frame> frame) : frame_(std::move(frame)) {}
  std::unique_ptr<SavedVariableHooks> make() override { return std::make_unique<FrameHook>(frame_); }

 private:
  const std::shared_ptr<Frame> frame_;
};

// Of one or two inputs: LibTorch sees no gradient of a list of tensors.
struct Reentrant : torch::autograd::Function<Reentrant> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& first, const at::Tensor& second,
                            const RegionFunction& function, const std::shared_ptr<Calls>& calls) {
    const variable_list inputs = second.defined() ? variable_list{first, second} : variable_list{first};
    context->save_for_backward(inputs);
    context->saved_data["again"] = c10::IValue::make_capsule(c10::make_intrusive<Again>(function, calls));
    ++calls->runs;
    return function(inputs);
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const auto again = c10::static_intrusive_pointer_cast<Again>(context->saved_data["again"].toCapsule());
    const Tensors inputs = detached(context->get_saved_variables());
    ++again->calls->runs;
    at::Tensor out;
    {
      const at::AutoGradMode mode(true);
      out = again->function(inputs);
    }
    torch::autograd::backward({out}, {gradients[0]});
    variable_list found;
    for (const at::Tensor& input : inputs) {
      found.push_back(input.grad());
    }
    constexpr std::size_t kArguments = 4;
    found.resize(kArguments);
    return found;
  }

  struct Again : torch::CustomClassHolder {
    Again(RegionFunction function_, std::shared_ptr<Calls> calls_)
        : function(std::move(function_)), calls(std::move(calls_)) {}
    const RegionFunction function;
    const std::shared_ptr<Calls> calls;
  };
};

}  // namespace

ForeignScope::ForeignScope(ForeignHooks* hooks) : before_(std::exchange(innermost(), hooks)) {
  install_foreign_engine();
}

ForeignScope::~ForeignScope() { innermost() = before_; }

std::unique_ptr<ForeignHooks> foreign_hooks(std::uint32_t number, std::shared_ptr<Calls> calls) {
  return std::make_unique<CopyingHooks>(static_cast<How>(number % kHows), std::move(calls));
}

at::Tensor checkpoint_by_hooks(const RegionFunction& function, const Tensors& inputs,
                               const std::shared_ptr<Calls>& calls) {
  FrameHooks hooks(std::make_shared<Frame>(function, inputs, calls));
  const ForeignScope scope(&hooks);
  ++calls->runs;
  return function(inputs);
}

at::Tensor checkpoint_by_reentry(const RegionFunction& function, const Tensors& inputs,
                                 const std::shared_ptr<Calls>& calls) {
  return Reentrant::apply(inputs[0], inputs.size() > 1 ? inputs[1] : at::Tensor(), function, calls);
}

}  // namespace ebb::graphs

// Work on a side stream of a GPU, ordered by events, its memory by record_stream. On the CPU the same without streams.

#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/custom_function.h>

#include "test/random/operation.h"

namespace ebb::graphs {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// The side stream's own work, so that what the main stream does without waiting comes first.
void hold_up_current_stream(const at::Tensor& like) {
  constexpr std::int64_t kElements = 1 << 20;
  constexpr int kTimes = 40;
  at::Tensor busy = at::zeros({kElements}, like.options().dtype(at::kFloat));
  for (int i = 0; i < kTimes; ++i) {
    busy.cos_();
  }
}

// function(x) on a side stream that starts behind the current one. `done` is what a user of the result must wait for;
// nothing on the CPU.
struct OnSide {
  at::Tensor result;
  std::shared_ptr<c10::Event> done;
};

template <typename Function>
OnSide on_side(const Tensors& x, const Function& function) {
  if (!x[0].is_cuda()) {
    return {function(), nullptr};
  }
  const c10::impl::VirtualGuardImpl device(c10::kCUDA);
  const c10::Stream main = device.getStream(x[0].device());
  const c10::Stream side = device.getStreamFromGlobalPool(x[0].device());
  c10::Event begin(c10::kCUDA);
  begin.record(main);
  begin.block(side);
  OnSide made{{}, std::make_shared<c10::Event>(c10::kCUDA)};
  const c10::StreamGuard guard(side);
  hold_up_current_stream(x[0]);
  made.result = function();
  for (const at::Tensor& each : x) {
    each.record_stream(side);
  }
  made.result.record_stream(main);
  made.done->record(side);
  return made;
}

// Of the current stream of the tensor's device.
void wait_for(const std::shared_ptr<c10::Event>& event, const at::Tensor& tensor) {
  if (event != nullptr) {
    event->block(c10::impl::VirtualGuardImpl(c10::kCUDA).getStream(tensor.device()));
  }
}

// What the backward of Ahead leaves for that of Behind to wait for; two threads may go backward at once.
class Pending : public torch::CustomClassHolder {
 public:
  void add(std::shared_ptr<c10::Event> event) {
    const std::scoped_lock lock(mutex_);
    events_.push_back(std::move(event));
  }
  void wait(const at::Tensor& tensor) {
    const std::scoped_lock lock(mutex_);
    for (const auto& event : events_) {
      wait_for(event, tensor);
    }
  }

 private:
  std::mutex mutex_;
  std::vector<std::shared_ptr<c10::Event>> events_;
};

c10::intrusive_ptr<Pending> pending_of(AutogradContext* context) {
  return c10::static_intrusive_pointer_cast<Pending>(context->saved_data["pending"].toCapsule());
}

// Its backward starts work on the side stream with what it has saved, and does not wait for it.
struct Ahead : torch::autograd::Function<Ahead> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, c10::intrusive_ptr<Pending> pending) {
    context->save_for_backward({x});
    context->saved_data["pending"] = c10::IValue::make_capsule(std::move(pending));
    return x.sin();
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const at::Tensor x = context->get_saved_variables()[0];
    OnSide made = on_side({x, gradients[0]}, [&] { return gradients[0] * x.cos(); });
    pending_of(context)->add(std::move(made.done));
    return {std::move(made.result), at::Tensor()};
  }
};

// Its backward comes after that of Ahead. It first takes memory that was let go of meanwhile, then waits.
struct Behind : torch::autograd::Function<Behind> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, c10::intrusive_ptr<Pending> pending) {
    context->saved_data["pending"] = c10::IValue::make_capsule(std::move(pending));
    return x * 1;
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    constexpr int kTensors = 4;
    std::vector<at::Tensor> taken;
    for (int i = 0; gradients[0].is_cuda() && i < kTensors; ++i) {
      taken.push_back(at::full_like(gradients[0].detach(), -1e4));
    }
    pending_of(context)->wait(gradients[0]);
    return {gradients[0] * 1, at::Tensor()};
  }
};

at::Tensor backward_on_side(const Tensors& x, const Numbers& /*n*/) {
  const auto pending = c10::make_intrusive<Pending>();
  return Ahead::apply(Behind::apply(x[0], pending), pending);
}

// Saved on the side stream, where autograd then goes backward, too.
at::Tensor forward_on_side(const Tensors& x, const Numbers& /*n*/) {
  OnSide made = on_side({x[0]}, [&] { return x[0].sin() * x[0]; });
  wait_for(made.done, made.result);
  return made.result;
}

at::Tensor hook_on_side(const Tensors& x, const Numbers& /*n*/) {
  at::Tensor hooked = x[0] * 1;
  TORCH_CHECK(hooked.requires_grad(), "no gradient to hook");
  hooked.register_hook([saved = x[0].detach()](const at::Tensor& gradient) {
    OnSide made = on_side({gradient, saved}, [&] { return gradient * saved.cos(); });
    wait_for(made.done, made.result);
    return made.result;
  });
  return hooked;
}

}  // namespace

Operations stream_operations() {
  constexpr Kind kind = Kind::kCompute;
  return {
      {"backward_on_side", kind, 1, backward_on_side},
      {"forward_on_side", kind, 1, forward_on_side},
      {"hook_on_side", kind, 1, hook_on_side},
  };
}

}  // namespace ebb::graphs

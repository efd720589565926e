// The part of Interpreter that calls autograd.

#include <array>
#include <exception>
#include <thread>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Functions.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/autograd.h>

#include "test/random/interpreter.h"

namespace ebb::graphs {
namespace {

// Runs it on a thread of its own, and throws here what it throws there.
template <typename Function>
void run_elsewhere(const Function& function) {
  std::exception_ptr thrown;
  std::thread([&] {
    const ProgramThread thread;
    try {
      function();
    } catch (...) {
      thrown = std::current_exception();
    }
  }).join();
  if (thrown) {
    std::rethrow_exception(thrown);
  }
}

Tensors gradients_for(const Tensors& roots, std::uint64_t seed) {
  Tensors gradients;
  for (const at::Tensor& root : roots) {
    const at::Generator random = at::detail::createCPUGenerator(seed++);
    gradients.push_back(at::randn(root.sizes(), random, at::TensorOptions(root.scalar_type())).to(root.device()));
  }
  return gradients;
}

// That a custom function has saved and returned.
bool is_parameter(const at::Tensor& gradient) {
  return gradient.defined() && gradient.is_leaf() && gradient.requires_grad();
}

// Autograd has the current stream wait for a gradient that another stream has made, and leaves its memory to that
// stream.
void record_current_stream(const at::Tensor& gradient) {
  if (gradient.defined() && gradient.is_cuda()) {
    gradient.record_stream(c10::impl::VirtualGuardImpl(c10::kCUDA).getStream(gradient.device()));
  }
}

}  // namespace

at::Tensor Interpreter::backward(const Instruction& line) {
  const Tensors roots = values(line.operands);
  if (roots.empty()) {
    return {};
  }
  const Tensors gradients = gradients_for(roots, line.numbers[1]);
  if (line.operation->name == "grad") {
    return gradients_of(line, roots, gradients);
  }
  backward_into_leaves(line, roots, gradients);
  return at::zeros({});  // it succeeded
}

void Interpreter::backward_into_leaves(const Instruction& line, const Tensors& roots, const Tensors& gradients) {
  const auto call = [&] {
    torch::autograd::backward(roots, gradients, (line.numbers[0] & (kRetain | kCreate)) != 0,
                              (line.numbers[0] & kCreate) != 0);
  };
  if ((line.numbers[0] & kElsewhere) != 0) {
    run_elsewhere(call);
  } else {
    call();
  }
  for (const auto& [id, leaf] : leaves_) {
    record_current_stream(leaf.grad());
  }
}

at::Tensor Interpreter::gradients_of(const Instruction& line, const Tensors& roots, const Tensors& gradients) {
  const Tensors inputs = values(line.inputs);
  if (inputs.empty()) {
    return {};
  }
  const bool twice = (line.numbers[0] & kTwice) != 0 && may_run_twice_at_once_;
  std::array<Tensors, 2> found;
  const auto call = [&](Tensors& result) {
    result = torch::autograd::grad(roots, inputs, gradients, twice || (line.numbers[0] & (kRetain | kCreate)) != 0,
                                   (line.numbers[0] & kCreate) != 0, /*allow_unused=*/true);
  };
  if (twice) {
    std::thread other([&] {
      const ProgramThread thread;
      try {
        call(found[1]);
      } catch (const std::exception&) {  // this thread reports it
        found[1].clear();
      }
    });
    try {
      call(found[0]);
    } catch (...) {
      other.join();
      throw;
    }
    other.join();
  } else if ((line.numbers[0] & kElsewhere) != 0) {
    run_elsewhere([&] { call(found[0]); });
  } else {
    call(found[0]);
  }
  at::Tensor first;
  for (const Tensors& each : found) {
    for (const at::Tensor& gradient : each) {
      record_current_stream(gradient);
      records_.emplace_back(line.id, "gradient", gradient);
      may_swap_data_ = may_swap_data_ && !is_parameter(gradient);
      if (!first.defined()) {
        // Hooks of any kind hand out another tensor than the parameter, which stops being the parameter's when the
        // graph ends: LibTorch has weak references to what accumulates the parameter's gradient.
        first = is_parameter(gradient) ? gradient.detach() : gradient;
      }
    }
  }
  return first;
}

}  // namespace ebb::graphs

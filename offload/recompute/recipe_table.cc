#include "offload/recompute/recipe_table.h"

#include <mutex>
#include <typeindex>
#include <unordered_map>
#include <utility>

#include <ATen/Context.h>
#include <ATen/Functions.h>
#include <torch/csrc/autograd/generated/Functions.h>

#include "offload/base/libtorch_members.h"
#include "offload/recompute/recipe_input.h"

namespace ebb {
namespace {

namespace nodes = torch::autograd::generated;
using torch::autograd::Node;
using torch::autograd::SavedVariable;
using Tensors = std::span<const at::Tensor>;

// The inputs of one recipe, in the order in which they are asked for.
class Gathering {
 public:
  void need(const SavedVariable& variable) {
    inputs_.push_back(recipe_input(variable));
    complete_ = complete_ && inputs_.back() != nullptr && shape(inputs_.size() - 1).layout() == at::kStrided;
  }

  // Adds an optional input. Where the node has saved nothing, the operation gets an undefined tensor.
  void may_have(const SavedVariable& variable) {
    const bool nothing = !variable.has_hooks() && !variable.get_raw_data()->defined();
    if (nothing) {
      inputs_.push_back(nullptr);
    } else {
      need(variable);
    }
  }

  [[nodiscard]] bool complete() const { return complete_; }
  [[nodiscard]] const at::Tensor& shape(std::size_t input) const { return inputs_[input]->shape(); }

  // Nullopt unless complete. The output's dtype is the first input's.
  [[nodiscard]] std::optional<Ingredients> with(Recompute cost, Ingredients::Forward forward) && {
    if (!complete_) {
      return std::nullopt;
    }
    return Ingredients{cost, shape(0).scalar_type(), std::move(inputs_), std::move(forward)};
  }

 private:
  Ingredients::Inputs inputs_;
  bool complete_ = true;
};

std::optional<Ingredients> memory_bound(const SavedVariable& self, Ingredients::Forward forward) {
  Gathering gathering;
  gathering.need(self);
  return std::move(gathering).with(Recompute::kMemoryBound, std::move(forward));
}

// An operation that takes its input alone.
template <typename Known, at::Tensor (*Forward)(const at::Tensor&)>
std::optional<Ingredients> of_input(Node& node) {
  return memory_bound(static_cast<Known&>(node).self_, [](Tensors in) { return Forward(in[0]); });
}

// An operation of two operands. Its node saves each operand for the gradient of the other, and so has both only if both
// need a gradient.
std::optional<Ingredients> of_two(Recompute cost, const SavedVariable& first, const SavedVariable& second,
                                  at::Tensor (*forward)(const at::Tensor&, const at::Tensor&)) {
  Gathering gathering;
  gathering.need(first);
  gathering.need(second);
  if (!gathering.complete()) {
    return std::nullopt;
  }
  const at::ScalarType dtype = at::result_type(gathering.shape(0), gathering.shape(1));
  auto found = std::move(gathering).with(cost, [forward](Tensors in) { return forward(in[0], in[1]); });
  found->dtype = dtype;
  return found;
}

std::optional<Ingredients> of(nodes::GeluBackward0& node) {
  return memory_bound(node.self_, [how = node.approximate](Tensors in) { return at::gelu(in[0], how); });
}

std::optional<Ingredients> of(nodes::SoftplusBackward0& node) {
  return memory_bound(node.self_, [beta = node.beta, threshold = node.threshold](Tensors in) {
    return at::softplus(in[0], beta, threshold);
  });
}

std::optional<Ingredients> of(nodes::LeakyReluBackward0& node) {
  return memory_bound(node.self_, [slope = node.negative_slope](Tensors in) { return at::leaky_relu(in[0], slope); });
}

std::optional<Ingredients> of(nodes::EluBackward0& node) {
  return memory_bound(node.self_, [alpha = node.alpha, scale = node.scale, input_scale = node.input_scale](Tensors in) {
    return at::elu(in[0], alpha, scale, input_scale);
  });
}

// relu6 makes this node, too.
std::optional<Ingredients> of(nodes::HardtanhBackward0& node) {
  return memory_bound(
      node.self_, [least = node.min_val, most = node.max_val](Tensors in) { return at::hardtanh(in[0], least, most); });
}

std::optional<Ingredients> of(nodes::ClampBackward1& node) {
  return memory_bound(node.self_,
                      [least = node.min, most = node.max](Tensors in) { return at::clamp(in[0], least, most); });
}

std::optional<Ingredients> of(nodes::GluBackward0& node) {
  return memory_bound(node.self_, [dim = node.dim](Tensors in) { return at::glu(in[0], dim); });
}

std::optional<Ingredients> of(nodes::PowBackward0& node) {
  return memory_bound(node.self_, [exponent = node.exponent](Tensors in) { return at::pow(in[0], exponent); });
}

std::optional<Ingredients> of(nodes::ReflectionPad2DBackward0& node) {
  return memory_bound(node.self_,
                      [padding = node.padding](Tensors in) { return at::reflection_pad2d_symint(in[0], padding); });
}

std::optional<Ingredients> of(nodes::MulBackward0& node) {
  return of_two(Recompute::kMemoryBound, node.self_, node.other_, at::mul);
}

std::optional<Ingredients> of(nodes::DivBackward0& node) {
  return of_two(Recompute::kMemoryBound, node.self_, node.other_, at::div);
}

// The node has 1 / rms of each row, but not the epsilon in it. CUDA's kernels compute weight * (rstd * x) in the
// precision of rstd and round once (aten/src/ATen/native/cuda/layer_norm_kernel.cu); other devices do not make this
// node.
std::optional<Ingredients> of(nodes::FusedRmsNormBackward0& node) {
  Gathering gathering;
  gathering.need(node.input_);
  gathering.need(node.result1_);
  gathering.may_have(node.weight_);
  if (!gathering.complete() || !gathering.shape(0).is_cuda()) {
    return std::nullopt;
  }
  return std::move(gathering).with(Recompute::kMemoryBound, [](Tensors in) {
    const at::Tensor scaled = at::mul(in[0], in[1]);
    at::Tensor result = at::empty_like(in[0], at::MemoryFormat::Contiguous);
    return in[2].defined() ? at::mul_out(result, scaled, in[2]) : result.copy_(scaled);
  });
}

std::optional<Ingredients> of(nodes::MmBackward0& node) {
  return of_two(Recompute::kComputeBound, node.self_, node.mat2_, at::mm);
}

std::optional<Ingredients> of(nodes::BmmBackward0& node) {
  return of_two(Recompute::kComputeBound, node.self_, node.mat2_, at::bmm);
}

bool convolves_as_before(const at::Tensor& input) {
  const at::Context& settings = at::globalContext();
  return !input.is_cuda() || (settings.deterministicCuDNN() && !settings.benchmarkCuDNN());
}

// An undefined bias has the sizes {0}.
bool has_bias(const nodes::ConvolutionBackward0& node) {
  const auto& sizes = node.bias_sym_sizes_opt.list;
  return sizes && !(sizes->size() == 1 && sizes->front() == 0);
}

// Convolutions without bias only, because the node does not save a bias.
std::optional<Ingredients> of(nodes::ConvolutionBackward0& node) {
  Gathering gathering;
  gathering.need(node.input_);
  gathering.need(node.weight_);
  if (!gathering.complete() || has_bias(node) || !convolves_as_before(gathering.shape(0))) {
    return std::nullopt;
  }
  return std::move(gathering).with(
      Recompute::kComputeBound,
      [stride = node.stride, padding = node.padding, dilation = node.dilation, transposed = node.transposed,
       output_padding = node.output_padding, groups = node.groups](Tensors in) {
        return at::convolution_symint(in[0], in[1], {}, stride, padding, dilation, transposed, output_padding, groups);
      });
}

std::optional<at::Tensor> if_defined(const at::Tensor& tensor) {
  return tensor.defined() ? std::optional(tensor) : std::nullopt;
}

// What all kinds of attention have in common. `call` gets the tensors (query, key, value and then, if the kind has a
// mask, the mask), whether the attention is causal, and the scale.
template <typename Attention, typename Call>
std::optional<Ingredients> attention(const Attention& node, const SavedVariable* mask, Call call) {
  Gathering gathering;
  gathering.need(node.query_);
  gathering.need(node.key_);
  gathering.need(node.value_);
  if (mask != nullptr) {
    gathering.may_have(*mask);
  }
  if (node.dropout_p != 0) {
    return std::nullopt;
  }
  return std::move(gathering).with(Recompute::kComputeBound,
                                   [call, causal = node.is_causal, scale = node.scale](Tensors in) -> at::Tensor {
                                     return std::get<0>(call(in, causal, scale));
                                   });
}

std::optional<Ingredients> of(nodes::ScaledDotProductFlashAttentionBackward0& node) {
  return attention(node, nullptr, [](Tensors in, bool causal, std::optional<double> scale) {
    return at::_scaled_dot_product_flash_attention(in[0], in[1], in[2], 0.0, causal, false, scale);
  });
}

std::optional<Ingredients> of(nodes::ScaledDotProductCudnnAttentionBackward0& node) {
  return attention(node, &node.attn_bias_, [](Tensors in, bool causal, std::optional<double> scale) {
    return at::_scaled_dot_product_cudnn_attention(in[0], in[1], in[2], if_defined(in[3]), true, 0.0, causal, false,
                                                   scale);
  });
}

std::optional<Ingredients> of(nodes::ScaledDotProductEfficientAttentionBackward0& node) {
  return attention(node, &node.attn_bias_, [](Tensors in, bool causal, std::optional<double> scale) {
    return at::_scaled_dot_product_efficient_attention(in[0], in[1], in[2], if_defined(in[3]), true, 0.0, causal,
                                                       scale);
  });
}

std::optional<Ingredients> of(nodes::ScaledDotProductFlashAttentionForCpuBackward0& node) {
  return attention(node, &node.attn_mask_, [](Tensors in, bool causal, std::optional<double> scale) {
    return at::_scaled_dot_product_flash_attention_for_cpu(in[0], in[1], in[2], 0.0, causal, if_defined(in[3]), scale);
  });
}

using Of = std::optional<Ingredients> (*)(Node&);

template <typename... Known>
std::unordered_map<std::type_index, Of> table_of() {
  return {{typeid(Known), [](Node& node) { return of(static_cast<Known&>(node)); }}...};
}

}  // namespace

std::optional<Ingredients> ingredients(Node& node) {
  static const auto* const table = [] {
    auto* const made = new auto(
        table_of<nodes::GeluBackward0, nodes::SoftplusBackward0, nodes::LeakyReluBackward0, nodes::EluBackward0,
                 nodes::HardtanhBackward0, nodes::ClampBackward1, nodes::GluBackward0, nodes::ReflectionPad2DBackward0,
                 nodes::PowBackward0, nodes::MulBackward0, nodes::DivBackward0, nodes::FusedRmsNormBackward0,
                 nodes::MmBackward0, nodes::BmmBackward0, nodes::ConvolutionBackward0,
                 nodes::ScaledDotProductFlashAttentionBackward0, nodes::ScaledDotProductCudnnAttentionBackward0,
                 nodes::ScaledDotProductEfficientAttentionBackward0,
                 nodes::ScaledDotProductFlashAttentionForCpuBackward0>());
    made->emplace(typeid(nodes::SiluBackward0), &of_input<nodes::SiluBackward0, at::silu>);
    made->emplace(typeid(nodes::MishBackward0), &of_input<nodes::MishBackward0, at::mish>);
    made->emplace(typeid(nodes::HardswishBackward0), &of_input<nodes::HardswishBackward0, at::hardswish>);
    made->emplace(typeid(nodes::SinBackward0), &of_input<nodes::SinBackward0, at::sin>);
    made->emplace(typeid(nodes::CosBackward0), &of_input<nodes::CosBackward0, at::cos>);
    return made;
  }();
  const auto known = table->find(typeid(node));
  if (known == table->end()) {
    return std::nullopt;
  }
  // Another thread's backward may be making the node let go of its saves. A node that is being run gives no recipe.
  const std::unique_lock lock(mutex_of(node), std::try_to_lock);
  return lock ? known->second(node) : std::nullopt;
}

}  // namespace ebb

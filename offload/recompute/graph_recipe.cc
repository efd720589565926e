#include "offload/recompute/graph_recipe.h"

#include <algorithm>
#include <optional>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/generated/Functions.h>

#include "offload/base/autograd_info.h"

namespace ebb {
namespace {

using torch::autograd::Node;

bool fills_its_storage(const at::Tensor& tensor) {
  return tensor.storage_offset() == 0 && tensor.is_non_overlapping_and_dense() && !tensor.is_conj() &&
         !tensor.is_neg() && tensor.nbytes() == tensor.storage().nbytes();
}

// A linear layer without bias returns at::_unsafe_view of a matmul: another tensor over the matmul's storage, but no
// view to autograd.
NodePtr through_unsafe_view(NodePtr node) {
  if (dynamic_cast<torch::autograd::generated::UnsafeViewBackward0*>(node.get()) != nullptr) {
    const torch::autograd::Edge& edge = node->next_edge(0);
    return edge.input_nr == 0 ? edge.function : nullptr;
  }
  return node;
}

// Whether views alone lead from the base to the tensor, by their nodes. A custom function that returns its input makes
// a view, too, and may have written to the input by what LibTorch does not count: a collective.
bool only_views_made(const at::Tensor& tensor, const at::Tensor& base) {
  constexpr int kMostViews = 32;
  NodePtr node = tensor.grad_fn();
  for (int i = 0; i < kMostViews && node != nullptr && node != base.grad_fn(); ++i) {
    if (is_custom(*node) || node->num_outputs() == 0) {
      return false;
    }
    node = node->next_edge(0).function;
  }
  return node == base.grad_fn();
}

int depth_of(const Ingredients::Inputs& inputs) {
  int deepest = 0;
  for (const auto& input : inputs) {
    deepest = std::max(deepest, input == nullptr ? 0 : input->recipe_depth());
  }
  return deepest + 1;
}

bool made_on_current_stream(const Node& node, c10::Device device) {
  const std::optional<c10::Stream> stream = const_cast<Node&>(node).stream();
  return !stream || *stream == c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

}  // namespace

std::unique_ptr<GraphRecipe> GraphRecipe::find(const at::Tensor& saved) {
  const at::Tensor whole = saved.is_view() ? at::Tensor(saved._base()) : saved;
  if (!whole.has_storage()) {  // the values of a sparse tensor
    return nullptr;
  }
  const bool same_storage = whole.storage().unsafeGetStorageImpl() == saved.storage().unsafeGetStorageImpl();
  if (!same_storage || whole._version() != 0 || !fills_its_storage(whole) || whole.output_nr() != 0 ||
      whole.grad_fn() == nullptr || (saved.is_view() && !only_views_made(saved, whole))) {
    return nullptr;
  }
  const NodePtr node = through_unsafe_view(whole.grad_fn());
  if (node == nullptr || !made_on_current_stream(*node, whole.device())) {
    return nullptr;
  }
  std::optional<Ingredients> found = ingredients(*node);
  if (!found || found->dtype != whole.scalar_type()) {
    return nullptr;
  }
  auto recipe = std::make_unique<GraphRecipe>(*std::move(found), whole);
  return recipe->depth() <= kMaxRecipeDepth ? std::move(recipe) : nullptr;
}

GraphRecipe::GraphRecipe(Ingredients ingredients, const at::Tensor& like)
    : Recipe(depth_of(ingredients.inputs)),
      ingredients_(std::move(ingredients)),
      like_(like),
      dtype_(like.scalar_type()) {}

c10::Storage GraphRecipe::make() {
  const at::NoGradGuard no_grad;
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  std::vector<at::Tensor> inputs;
  inputs.reserve(ingredients_.inputs.size());
  for (const auto& input : ingredients_.inputs) {
    inputs.push_back(input == nullptr ? at::Tensor() : input->get_for_recipe());
  }
  at::Tensor made = ingredients_.forward(inputs);
  TORCH_INTERNAL_ASSERT(made.scalar_type() == dtype_ && made.numel() == like_.numel());
  const bool same_layout =
      made.sizes() == like_.sizes() ? made.strides() == like_.strides() : made.is_contiguous() && like_.is_contiguous();
  if (!same_layout || !fills_its_storage(made)) {
    at::Tensor laid_out = at::empty_strided(like_.sizes(), like_.strides(), made.options());
    laid_out.copy_(made.reshape(like_.sizes()));
    made = std::move(laid_out);
  }
  return made.storage();
}

}  // namespace ebb

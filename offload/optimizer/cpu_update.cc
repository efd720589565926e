#include "offload/optimizer/cpu_update.h"

#include <algorithm>
#include <cstdint>
#include <map>
#include <string>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>

#include "offload/optimizer/parts.h"

namespace ebb {
namespace {

constexpr std::int64_t kPiece = 1 << 21;  // elements: with 16 threads 512 KiB in float32 for each

}  // namespace

void update_on_cpu(const UpdateRule& rule, const RowUpdate& rows, const at::Tensor& rounded,
                   const torch::optim::OptimizerOptions& options) {
  const at::NoGradGuard no_grad;
  const at::Tensor target = rows.target.view({-1});
  const at::Tensor gradient = rows.gradient.view({-1});
  const at::Tensor result = rounded.defined() ? rounded.view({-1}) : at::Tensor();
  const at::Tensor before =  // what the target rounds to
      rounded.defined() ? at::empty({std::min(kPiece, target.numel())}, rounded.options()) : at::Tensor();
  std::map<std::string, at::Tensor> states;
  for (const auto& [name, state] : rows.states) {
    states.emplace(name, state.view({-1}));
  }
  const bool is_converted = gradient.scalar_type() != target.scalar_type();
  const at::Tensor converted =
      is_converted ? at::empty({std::min(kPiece, target.numel())}, target.options()) : at::Tensor();
  for (std::int64_t begin = 0; begin < target.numel(); begin += kPiece) {
    const std::int64_t size = std::min(kPiece, target.numel() - begin);
    const auto piece = [&](const at::Tensor& whole) { return whole.narrow(0, begin, size); };
    std::map<std::string, at::Tensor> piece_states;
    for (const auto& [name, state] : states) {
      piece_states.emplace(name, piece(state));
    }
    const at::Tensor piece_target = piece(target);
    const at::Tensor piece_gradient =
        is_converted ? converted.narrow(0, 0, size).copy_(piece(gradient)) : piece(gradient);
    if (result.defined() && !at::equal(before.narrow(0, 0, size).copy_(piece_target), piece(result))) {
      follow_weight(piece_target, piece(result));  // which makes tensors of the piece's size
    }
    rule.update_fused({piece_target, piece_gradient, piece_states, rows.step, rows.has_new_states}, options);
    if (result.defined()) {
      piece(result).copy_(piece_target);
    }
  }
}

}  // namespace ebb

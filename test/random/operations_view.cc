// Views of all kinds, and copies that only change the form.

#include <algorithm>
#include <array>
#include <numeric>
#include <optional>
#include <utility>
#include <vector>

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <c10/util/Exception.h>

#include "test/random/operation.h"

namespace ebb::graphs {
namespace {

at::Tensor narrow(const Tensors& x, const Numbers& n) {
  const std::int64_t along = dimension(x[0], n[0]);
  const std::int64_t start = choose(n[1], x[0].size(along));
  return x[0].narrow(along, start, 1 + choose(n[2], x[0].size(along) - start));
}

at::Tensor select(const Tensors& x, const Numbers& n) {
  const std::int64_t along = dimension(x[0], n[0]);
  return x[0].select(along, choose(n[1], x[0].size(along)));
}

at::Tensor slice(const Tensors& x, const Numbers& n) {
  return x[0].slice(dimension(x[0], n[0]), n[1] % 2, std::nullopt, 1 + n[2] % 3);
}

at::Tensor unfold(const Tensors& x, const Numbers& n) {
  const std::int64_t along = dimension(x[0], n[0]);
  return x[0].unfold(along, 1 + choose(n[1], x[0].size(along)), 1 + n[2] % 2);
}

// Windows that overlap in memory.
at::Tensor as_strided(const Tensors& x, const Numbers& n) {
  const std::int64_t side = std::clamp<std::int64_t>(x[0].numel() / 2, 1, 1 + n[0] % 6);
  return x[0].as_strided({side, side}, {1, 1}, x[0].storage_offset());
}

at::Tensor expand(const Tensors& x, const Numbers& n) {
  std::vector<std::int64_t> sizes = x[0].sizes().vec();
  sizes.insert(sizes.begin(), 1 + n[0] % 3);
  return x[0].expand(sizes);
}

at::Tensor permute(const Tensors& x, const Numbers& n) {
  std::vector<std::int64_t> order(x[0].dim());
  std::iota(order.begin(), order.end(), 0);
  if (!order.empty()) {
    std::rotate(order.begin(), order.begin() + n[0] % order.size(), order.end());
    std::swap(order.front(), order[n[1] % order.size()]);
  }
  return x[0].permute(order);
}

at::Tensor reshape(const Tensors& x, const Numbers& n) {
  return x[0].numel() % 2 == 0 && n[0] % 2 == 0 ? x[0].reshape({2, x[0].numel() / 2}) : x[0].reshape({-1});
}

at::Tensor split(const Tensors& x, const Numbers& n) {
  const std::vector<at::Tensor> parts = x[0].split(2, dimension(x[0], n[0]));
  return parts[choose(n[1], static_cast<std::int64_t>(parts.size()))];
}

at::Tensor unbind(const Tensors& x, const Numbers& n) {
  const std::vector<at::Tensor> parts = x[0].unbind(dimension(x[0], n[0]));
  return parts[choose(n[1], static_cast<std::int64_t>(parts.size()))];
}

at::Tensor to_type(const Tensors& x, const Numbers& n) {
  TORCH_CHECK(x[0].is_floating_point(), "to_type is for real numbers");
  constexpr std::array kTypes{at::kFloat, at::kDouble, at::kBFloat16, at::kHalf};
  return x[0].to(kTypes[n[0] % kTypes.size()]);
}

}  // namespace

Operations view_operations() {
  constexpr Kind kind = Kind::kView;
  return {
      {"transpose", kind, 1,
       [](const Tensors& x, const Numbers& n) { return x[0].transpose(dimension(x[0], n[0]), dimension(x[0], n[1])); }},
      {"mT", kind, 1, [](const Tensors& x, const Numbers&) { return x[0].mT(); }},
      {"narrow", kind, 1, narrow},
      {"select", kind, 1, select},
      {"slice", kind, 1, slice},
      {"unfold", kind, 1, unfold},
      {"as_strided", kind, 1, as_strided},
      {"expand", kind, 1, expand},
      {"permute", kind, 1, permute},
      {"reshape", kind, 1, reshape},
      {"view_flat", kind, 1, [](const Tensors& x, const Numbers&) { return x[0].view({-1}); }},
      {"split", kind, 1, split},
      {"unbind", kind, 1, unbind},
      {"diagonal", kind, 1,
       [](const Tensors& x, const Numbers& n) {
         return x[0].diagonal(0, n[0] % 2 == 0 ? 0 : -1, n[0] % 2 == 0 ? 1 : 0);
       }},
      {"unsqueeze", kind, 1,
       [](const Tensors& x, const Numbers& n) { return x[0].unsqueeze(n[0] % (x[0].dim() + 1)); }},
      {"squeeze", kind, 1, [](const Tensors& x, const Numbers&) { return x[0].squeeze(); }},
      {"flip", kind, 1, [](const Tensors& x, const Numbers& n) { return x[0].flip(dimension(x[0], n[0])); }},
      {"contiguous", kind, 1, [](const Tensors& x, const Numbers&) { return x[0].contiguous(); }},
      {"clone", kind, 1, [](const Tensors& x, const Numbers&) { return x[0].clone(); }},
      {"detach", kind, 1, [](const Tensors& x, const Numbers&) { return x[0].detach(); }},
      {"to_type", kind, 1, to_type},
      {"conj", kind, 1, [](const Tensors& x, const Numbers&) { return x[0].conj(); }},
      {"imag_of_conj", kind, 1, [](const Tensors& x, const Numbers&) { return at::imag(x[0].conj()); }},
      {"real", kind, 1, [](const Tensors& x, const Numbers&) { return at::real(x[0]); }},
      {"view_as_real", kind, 1, [](const Tensors& x, const Numbers&) { return at::view_as_real(x[0]); }},
      {"view_as_complex", kind, 1, [](const Tensors& x, const Numbers&) { return at::view_as_complex(x[0]); }},
  };
}

}  // namespace ebb::graphs

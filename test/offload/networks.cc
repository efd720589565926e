#include "test/offload/networks.h"

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>

namespace ebb {
namespace {

at::Tensor tanh_layer(Inputs& in, const at::Tensor& x) { return at::linear(x, in.leaf({8, 8})).tanh() * x.sin(); }

at::Tensor layers(Inputs& in, int count, at::Tensor (*next)(Inputs&, const at::Tensor&)) {
  at::Tensor x = in.activation({5, 8});
  for (int i = 0; i < count; ++i) {
    x = next(in, x);
  }
  return x;
}

}  // namespace

at::Tensor layer(Inputs& in, const at::Tensor& x) { return at::linear(x, in.leaf({8, 8})).sigmoid() * x.sin(); }

at::Tensor two_layers(Inputs& in) { return layers(in, 2, layer); }

at::Tensor three_layers(Inputs& in) { return layers(in, 3, layer); }

at::Tensor two_tanh_layers(Inputs& in) { return layers(in, 2, tanh_layer); }

}  // namespace ebb

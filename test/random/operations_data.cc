// Other memory for a tensor, behind autograd's back: weights that are swapped for their averages, sharded weights whose
// memory comes and goes. No version counter moves.

#include <utility>

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/native/Resize.h>
#include <ATen/native/cuda/Resize.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/autograd.h>

#include "offload/managed/uses.h"
#include "test/random/operation.h"

namespace ebb::graphs {
namespace {

void resize(const at::Tensor& tensor, std::size_t bytes) {
  c10::StorageImpl* const storage = tensor.storage().unsafeGetStorageImpl();
  if (tensor.is_cuda()) {
    at::native::resize_bytes_cuda(storage, bytes);
  } else {
    at::native::resize_bytes_cpu(storage, bytes);
  }
}

// All bytes of its storage, with a version counter of their own. The new tensor is none that ebb manages: whoever asks
// has the bytes on the device.
at::Tensor bytes_of(const at::Tensor& tensor) {
  const auto bytes = static_cast<std::int64_t>(tensor.storage().nbytes());
  at::Tensor all = at::empty({0}, tensor.options().dtype(at::kByte));
  all.set_(tensor.storage(), 0, {bytes}, {1});
  return all;
}

// Without memory while this lives, and then with the same bytes somewhere else.
class Emptied {
 public:
  explicit Emptied(at::Tensor tensor) : tensor_(std::move(tensor)) {
    const Uses here(tensor_);
    bytes_ = bytes_of(tensor_).clone();
    resize(tensor_, 0);
    taken_ = at::full_like(bytes_, 0xff);  // likely where the tensor was
  }
  ~Emptied() {
    const at::NoGradGuard no_grad;
    resize(tensor_, static_cast<std::size_t>(bytes_.numel()));
    bytes_of(tensor_).copy_(bytes_);
  }
  Emptied(const Emptied&) = delete;
  Emptied& operator=(const Emptied&) = delete;

 private:
  const at::Tensor tensor_;
  at::Tensor bytes_;
  at::Tensor taken_;
};

void check_can_be_emptied(const at::Tensor& tensor) {
  TORCH_CHECK(tensor.storage().resizable() && tensor.storage().nbytes() > 0, "memory that does not come and go");
}

at::Tensor swap_data(const Tensors& x, const Numbers& /*n*/) {
  for (const at::Tensor& each : x) {
    TORCH_CHECK(!each.is_view() && (each.is_floating_point() || each.is_complex()), "not a tensor to swap");
  }
  at::Tensor first = x[0];
  at::Tensor second = x[1];
  if (first.sizes() == second.sizes() && first.scalar_type() == second.scalar_type() &&
      !share_a_storage(first, second)) {
    const at::Tensor data = first.variable_data();
    first.set_data(second.variable_data());
    second.set_data(data);
  } else {
    first.set_data(first.detach() * 0.5);
  }
  return first;
}

at::Tensor refill(const Tensors& x, const Numbers& /*n*/) {
  check_can_be_emptied(x[0]);
  const Emptied emptied(x[0]);
  return x[0];
}

// Derives by the second operand what is made of the first, while the first has no memory: plain autograd does not look
// there, but a recipe for what lies between takes it.
at::Tensor derive_while_empty(const Tensors& x, const Numbers& /*n*/) {
  TORCH_CHECK(x[0].is_floating_point() && x[0].numel() > 0 && x[1].requires_grad(), "nothing to derive by");
  const at::Tensor first = (x[0].detach() * 0.5).requires_grad_();  // a weight: no copy out of it is under way
  const at::Tensor& second = x[1];
  const at::Tensor out = at::silu(first) * fit(second, first);
  const Emptied emptied(first);
  const Tensors slopes = torch::autograd::grad({out}, {second}, {at::ones_like(out)}, /*retain_graph=*/true,
                                               /*create_graph=*/false, /*allow_unused=*/true);
  TORCH_CHECK(slopes[0].defined(), "nothing to derive by");
  return out;
}

}  // namespace

Operations data_operations() {
  constexpr Kind kind = Kind::kData;
  return {
      {"swap_data", kind, 2, swap_data},
      {"refill", kind, 1, refill},
      {"derive_while_empty", kind, 2, derive_while_empty},
  };
}

}  // namespace ebb::graphs

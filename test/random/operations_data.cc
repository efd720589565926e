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

// All bytes of its storage, with a version counter of their own.
at::Tensor bytes_of(const at::Tensor& tensor) {
  const auto bytes = static_cast<std::int64_t>(tensor.storage().nbytes());
  at::Tensor all = at::empty({0}, tensor.options().dtype(at::kByte));
  all.set_(tensor.storage(), 0, {bytes}, {1});
  return all;
}

// Without memory while this lives, and then with the same bytes somewhere else.
class Emptied {
 public:
  explicit Emptied(at::Tensor tensor) : tensor_(std::move(tensor)), bytes_(bytes_of(tensor_).clone()) {
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
  const at::Tensor bytes_;
  at::Tensor taken_;
};

// Weights only: memory that is resized while a copy out reads it is read after it was freed.
void check_can_be_emptied(const at::Tensor& tensor) {
  TORCH_CHECK(tensor.is_leaf() && tensor.requires_grad() && tensor.storage().nbytes() > 0, "not a weight");
}

at::Tensor swap_data(const Tensors& x, const Numbers& /*n*/) {
  for (const at::Tensor& each : x) {
    TORCH_CHECK(!each.is_view() && (each.is_floating_point() || each.is_complex()), "not a tensor to swap");
  }
  at::Tensor first = x[0];
  at::Tensor second = x[1];
  if (first.sizes() == second.sizes() && first.scalar_type() == second.scalar_type() && !first.is_alias_of(second)) {
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

}  // namespace

Operations data_operations() {
  constexpr Kind kind = Kind::kData;
  return {
      {"swap_data", kind, 2, swap_data},
      {"refill", kind, 1, refill},
  };
}

}  // namespace ebb::graphs

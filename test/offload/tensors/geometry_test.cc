// What is saved comes back with every property that it had, whatever its shape and type.

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <catch2/catch.hpp>
#include <torch/csrc/autograd/saved_variable.h>

#include "test/offload/parity.h"

namespace ebb {
namespace {

using torch::autograd::SavedVariable;

constexpr std::uint64_t kFloat = sizeof(float);

// All that a tensor is, without holding its memory.
class Snapshot {
 public:
  explicit Snapshot(const at::Tensor& tensor)
      : sizes_(tensor.sizes().vec()),
        strides_(tensor.strides().vec()),
        offset_(tensor.storage_offset()),
        flags_(flags(tensor)),
        options_(tensor.options()),
        bytes_(bytes(tensor)) {}

  void check(const at::Tensor& found) const {
    CHECK(found.sizes() == sizes_);
    CHECK(found.strides() == strides_);
    CHECK(found.storage_offset() == offset_);
    CHECK(flags(found) == flags_);
    CHECK(found.dtype() == options_.dtype());
    CHECK(found.device() == options_.device());
    CHECK((bytes(found) == bytes_));  // in parentheses: not to be printed
  }

 private:
  static std::vector<bool> flags(const at::Tensor& tensor) {
    std::vector<bool> flags{tensor.is_conj(), tensor.is_neg(), tensor.requires_grad(), tensor.is_contiguous(),
                            tensor.is_non_overlapping_and_dense()};
    if (tensor.dim() == 4) {
      flags.push_back(tensor.is_contiguous(at::MemoryFormat::ChannelsLast));
    }
    if (tensor.dim() == 5) {
      flags.push_back(tensor.is_contiguous(at::MemoryFormat::ChannelsLast3d));
    }
    return flags;
  }

  // Of the whole storage: a view's holes are other views' values.
  static std::string bytes(const at::Tensor& tensor) {
    return {static_cast<const char*>(tensor.storage().data()), tensor.storage().nbytes()};
  }

  const std::vector<std::int64_t> sizes_;
  const std::vector<std::int64_t> strides_;
  const std::int64_t offset_;
  const std::vector<bool> flags_;
  const at::TensorOptions options_;
  const std::string bytes_;
};

// Saves what `make` returns, as an operation would, and lets go of it; then asks for it twice.
void expect_return(const std::function<at::Tensor()>& make) {
  for (const Setting& setting : {late_without_stash(), disk(), late(), all_settings()[3]}) {
    INFO(setting.name);
    const NoLeak freed;
    Rig rig(setting);
    at::Tensor tensor = make();
    const Snapshot expected(tensor);
    std::unique_ptr<SavedVariable> saved;
    {
      const OffloadGuard guard(rig.offloader());
      saved = std::make_unique<SavedVariable>(tensor, /*is_output=*/false);
    }
    const std::uint64_t bytes = tensor.storage().nbytes();
    tensor.reset();
    CHECK(rig.stats().offloaded.tensors == 1);
    CHECK(rig.stats().offloaded.bytes == bytes);
    expected.check(saved->unpack());
    expected.check(saved->unpack());
    if (setting.options.stash_bytes) {
      CHECK(rig.stats().reused.tensors == 0);  // it really was away
    }
  }
}

at::Tensor filled(at::IntArrayRef sizes, at::ScalarType dtype = at::kFloat) {
  at::Tensor tensor = at::empty(sizes, dtype);
  auto* const bytes = static_cast<std::uint8_t*>(tensor.mutable_data_ptr());
  for (std::size_t i = 0; i < tensor.nbytes(); ++i) {
    bytes[i] = static_cast<std::uint8_t>(dtype == at::kBool ? i % 3 % 2 : 31 * i + 7);
  }
  return tensor;
}

TEST_CASE_METHOD(NoLeak, "a square transpose comes back transposed, not made contiguous") {
  expect_return([] { return filled({8, 8}).t(); });
  expect_return([] { return filled({2, 5, 5}).transpose(1, 2); });
  expect_return([] { return filled({5, 5, 5}).permute({2, 0, 1}); });
}

TEST_CASE_METHOD(NoLeak, "slices with steps and offsets come back as slices") {
  expect_return([] { return filled({9, 10}).slice(0, 1, 9, 3).slice(1, 2, 10, 4); });
  expect_return([] { return filled({9, 10}).select(1, 7); });
  expect_return([] { return filled({9, 10}).narrow(0, 8, 1); });
  expect_return([] { return filled({7, 7}).diagonal(1); });
}

TEST_CASE_METHOD(NoLeak, "strides of zero come back as strides of zero, and only the memory behind them moves") {
  expect_return([] { return filled({1, 5}).expand({7, 5}); });
  expect_return([] { return filled({}).expand({3, 4}); });
  expect_return([] { return filled({4}).unsqueeze(1).expand({4, 6}).t(); });
}

TEST_CASE_METHOD(NoLeak, "overlapping strides come back overlapping") {
  expect_return([] { return filled({20}).unfold(0, 5, 2); });
  expect_return([] { return filled({20}).as_strided({5, 4}, {3, 2}, 1); });
  expect_return([] { return filled({20}).as_strided({4, 4}, {1, 1}, 3); });
}

TEST_CASE_METHOD(NoLeak, "channels-last memory in four and five dimensions comes back channels-last") {
  expect_return([] { return filled({2, 3, 4, 5}).contiguous(at::MemoryFormat::ChannelsLast); });
  expect_return([] { return filled({2, 3, 2, 4, 5}).contiguous(at::MemoryFormat::ChannelsLast3d); });
  expect_return([] { return filled({2, 1, 4, 4}).contiguous(at::MemoryFormat::ChannelsLast); });
  expect_return([] { return at::empty_strided({2, 1, 1, 1}, {1, 1, 7, 9}).fill_(3); });  // any format's strides
  expect_gradient_parity([](Inputs& in) {
    return in.activation({2, 3, 2, 4, 5}).contiguous(at::MemoryFormat::ChannelsLast3d).exp().square();
  });
}

TEST_CASE_METHOD(NoLeak, "conjugate and negative bits come back set, their bytes unresolved") {
  expect_return([] { return filled({4, 3}, at::kComplexFloat).conj(); });
  expect_return([] { return filled({4, 3}, at::kComplexDouble).t().conj(); });
  expect_return([] { return at::imag(filled({4, 3}, at::kComplexFloat).conj()); });
  expect_return([] { return at::_neg_view(filled({4, 3})); });
  expect_return([] { return at::_neg_view(filled({5}, at::kComplexFloat).conj()).narrow(0, 1, 3); });
}

TEST_CASE_METHOD(NoLeak, "tensors of no dimensions, of many and of one element come back") {
  expect_return([] { return filled({}); });
  expect_return([] { return filled({5}).select(0, 3); });
  expect_return([] { return filled({1, 1, 1}); });
  expect_return([] { return filled({1}).view(std::vector<std::int64_t>(40, 1)); });
}

TEST_CASE_METHOD(NoLeak, "an empty view of memory that is not comes back empty, at its offset") {
  expect_return([] { return filled({4, 5}).narrow(0, 2, 0); });
  expect_return([] { return filled({4, 5}).narrow(1, 5, 0).t(); });
}

TEST_CASE_METHOD(NoLeak, "tensors without bytes come back with their sizes and strides, and nothing moves") {
  for (const std::vector<std::int64_t>& sizes : std::vector<std::vector<std::int64_t>>{{0}, {0, 3}, {3, 0, 2}}) {
    Rig rig(late_without_stash());
    const at::Tensor tensor = at::empty(sizes).transpose(0, -1);
    std::unique_ptr<SavedVariable> saved;
    {
      const OffloadGuard guard(rig.offloader());
      saved = std::make_unique<SavedVariable>(tensor, /*is_output=*/false);
    }
    CHECK(saved->unpack().sizes() == tensor.sizes());
    CHECK(saved->unpack().strides() == tensor.strides());
    CHECK(rig.stats().offloaded.tensors == 0);
    CHECK(rig.stats().kept_for(KeptReason::kEmpty).tensors == 1);
  }
}

TEST_CASE_METHOD(NoLeak, "every type of number comes back with its bits") {
  for (const at::ScalarType dtype :
       {at::kBool,          at::kByte,          at::kChar,        at::kShort,           at::kInt,
        at::kLong,          at::kUInt16,        at::kUInt32,      at::kUInt64,          at::kHalf,
        at::kBFloat16,      at::kFloat,         at::kDouble,      at::kComplexHalf,     at::kComplexFloat,
        at::kComplexDouble, at::kFloat8_e4m3fn, at::kFloat8_e5m2, at::kFloat8_e4m3fnuz, at::kFloat8_e5m2fnuz,
        at::kFloat8_e8m0fnu}) {
    INFO(c10::toString(dtype));
    expect_return([=] { return filled({3, 5}, dtype); });
    expect_return([=] { return filled({5, 5}, dtype).t().narrow(1, 2, 3); });
  }
}

TEST_CASE_METHOD(NoLeak, "bfloat16 of every odd size comes back, however it lies on pages and sectors") {
  for (const std::int64_t size : {1, 3, 7, 63, 255, 257, 2047, 2049, 4095, 4097}) {
    INFO(size);
    expect_return([=] { return filled({size}, at::kBFloat16); });
  }
}

TEST_CASE_METHOD(NoLeak, "a tensor of more than one piece of a transfer, with an odd end, comes back") {
  expect_return([] { return filled({(std::int64_t{4} << 20) + 3}, at::kByte); });
}

TEST_CASE_METHOD(NoLeak, "a view in another element type comes back in it") {
  expect_return([] { return filled({6, 4}).view(at::kByte).narrow(1, 3, 5); });
  expect_return([] { return at::view_as_complex(filled({6, 2})); });
  expect_return([] { return filled({12}, at::kByte).narrow(0, 4, 8).view(at::kInt); });
}

// Quantised, nested and compressed tensors are more than one strided range of one storage.
TEST_CASE_METHOD(NoLeak, "quantised, nested and compressed tensors are left as they are, and counted so") {
  for (const at::Tensor& tensor : {at::quantize_per_tensor(at::ones({4, 4}), 0.5, 3, at::kQInt8),
                                   at::_nested_tensor_from_tensor_list({at::ones({2}), at::ones({3})}),
                                   at::eye(4).to_sparse_csr(), at::eye(4).to_sparse()}) {
    Rig rig(late_without_stash());
    std::unique_ptr<SavedVariable> saved;
    {
      const OffloadGuard guard(rig.offloader());
      saved = std::make_unique<SavedVariable>(tensor, /*is_output=*/false);
    }
    CHECK(rig.stats().kept_for(KeptReason::kUnmovable).tensors == 1);
    CHECK(rig.stats().offloaded.tensors == 0);
    const at::Tensor found = saved->unpack();
    CHECK(found.layout() == tensor.layout());
    CHECK(found.is_quantized() == tensor.is_quantized());
    CHECK(found.is_nested() == tensor.is_nested());
    if (!tensor.is_nested()) {
      CHECK((tensor.is_quantized() ? found.equal(tensor) : found.to_dense().equal(tensor.to_dense())));
    }
  }
}

// docs/design.md, "What is copied", says why.
TEST_CASE_METHOD(NoLeak,
                 "a row that was saved of a large storage takes the whole storage away, once, and brings it back") {
  Rig rig(late_without_stash());
  Inputs in;
  const at::Tensor leaf = in.leaf({512, 64});
  at::Tensor loss;
  {
    const OffloadGuard guard(rig.offloader());
    const at::Tensor buffer = leaf * 1.5;
    loss = buffer.select(0, 17).square().sum() + buffer.select(0, 400).square().sum();
    CHECK(rig.stats().saved.bytes == 2 * 512 * 64 * kFloat);
  }
  CHECK(rig.stats().offloaded.tensors == 1);
  CHECK(rig.stats().offloaded.bytes == 512 * 64 * kFloat);
  CHECK(rig.stats().deduplicated.bytes == 512 * 64 * kFloat);
  CHECK(rig.stats().saved_on_device.now_bytes == 0);  // the buffer was freed, as a copy of two rows would not have done
  loss.backward();
  CHECK(rig.stats().fetched.bytes == 512 * 64 * kFloat);
  at::Tensor expected = at::zeros({512, 64});
  for (const std::int64_t row : {17, 400}) {
    expected.select(0, row).copy_(leaf.detach().select(0, row) * 1.5 * 2 * 1.5);
  }
  CHECK(at::allclose(leaf.grad(), expected));
}

TEST_CASE_METHOD(NoLeak, "views of views, detached or not, share one copy and come back each with its own geometry") {
  Rig rig(late_without_stash());
  std::vector<std::unique_ptr<Snapshot>> expected;
  std::vector<std::unique_ptr<SavedVariable>> saved;
  {
    const at::Tensor base = filled({6, 8});
    const OffloadGuard guard(rig.offloader());
    for (const at::Tensor& view : {base, base.t(), base.t().narrow(0, 2, 4).detach(), base.view({2, 24}).select(0, 1),
                                   base.detach().view(at::kInt).slice(1, 0, 8, 3)}) {
      expected.push_back(std::make_unique<Snapshot>(view));
      saved.push_back(std::make_unique<SavedVariable>(view, /*is_output=*/false));
    }
  }
  CHECK(rig.stats().offloaded.tensors == 1);
  CHECK(rig.stats().deduplicated.tensors == 4);
  Tensors found;
  for (std::size_t i = 0; i < saved.size(); ++i) {
    found.push_back(saved[i]->unpack());
    expected[i]->check(found.back());
    CHECK(found.back().is_alias_of(found.front()));
  }
  CHECK(rig.stats().fetched.tensors == 1);
}

TEST_CASE_METHOD(NoLeak, "a new tensor at the address of one that was saved and freed is not taken for it") {
  for (const Setting& setting : {late_without_stash(), disk()}) {
    INFO(setting.name);
    Rig rig(setting);
    std::vector<std::unique_ptr<SavedVariable>> saved;
    const void* address = nullptr;
    for (int i = 0; i < 20; ++i) {
      const at::Tensor tensor = at::full({333}, i);
      CHECK((address == nullptr || tensor.const_data_ptr() == address));  // or this shows nothing
      address = tensor.const_data_ptr();
      const OffloadGuard guard(rig.offloader());
      saved.push_back(std::make_unique<SavedVariable>(tensor, /*is_output=*/false));
    }
    CHECK(rig.stats().offloaded.tensors == 20);
    CHECK(rig.stats().deduplicated.tensors == 0);
    for (int i = 0; i < 20; ++i) {
      CHECK(saved[static_cast<std::size_t>(i)]->unpack().equal(at::full({333}, i)));
    }
  }
}

}  // namespace
}  // namespace ebb

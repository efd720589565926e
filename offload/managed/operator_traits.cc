#include "offload/managed/operator_traits.h"

#include <algorithm>
#include <array>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>

#include <ATen/core/function_schema.h>
#include <ATen/core/jit_type.h>
#include <c10/util/LeftRight.h>

#include "streams/base/process_mark.h"

namespace ebb {
namespace {

using Kind = OperatorTraits::Kind;

bool only_makes_views(const c10::FunctionSchema& schema) {
  const auto is_view = [](const c10::Argument& result) {
    return result.alias_info() != nullptr && !result.alias_info()->isWrite();
  };
  const auto is_read = [](const c10::Argument& argument) {  // where to split another tensor, say
    return argument.alias_info() == nullptr && argument.type()->kind() == c10::TypeKind::TensorType;
  };
  return !schema.returns().empty() && std::ranges::all_of(schema.returns(), is_view) &&
         std::ranges::none_of(schema.arguments(), is_read);
}

// Operators with these names work place by place, but for those that take a tensor with a number for each place.
bool works_place_by_place(const c10::FunctionSchema& schema) {
  const std::string& name = schema.name();
  return (name.starts_with("aten::_foreach_") || name.starts_with("aten::_fused_") ||
          name.starts_with("aten::_amp_foreach_")) &&
         std::ranges::none_of(schema.arguments(), [](const c10::Argument& argument) {
           return argument.name() == "scalars" && argument.type()->kind() == c10::TypeKind::TensorType;
         });
}

Kind kind_of(const c10::FunctionSchema& schema) {
  constexpr std::array<std::string_view, 3> kMakers{"aten::zeros_like", "aten::ones_like", "aten::full_like"};
  constexpr std::array<std::string_view, 12> kOthersWithoutBytes{
      "aten::empty_like",        "aten::rand_like",      "aten::randn_like", "aten::new_empty",
      "aten::new_empty_strided", "aten::new_zeros",      "aten::new_ones",   "aten::new_full",
      "aten::is_same_size",      "aten::requires_grad_", "aten::detach_",    "aten::retain_grad"};
  const std::string& name = schema.name();
  if (only_makes_views(schema) || std::ranges::find(kOthersWithoutBytes, name) != kOthersWithoutBytes.end()) {
    return Kind::kUsesNoBytes;
  }
  if (std::ranges::find(kMakers, name) != kMakers.end()) {
    return Kind::kMakesAlike;
  }
  return works_place_by_place(schema) ? Kind::kPlaceByPlace
         : name.starts_with("c10d::") ? Kind::kCollective
                                      : Kind::kUsesBytes;
}

// By argument. Kernels from outside of LibTorch's core need not say what they write to (c10d::allreduce_ does not), and
// neither do those that keep running statistics. The schema of record_stream says so, and the operator writes no bytes.
std::uint64_t written_by(const c10::FunctionSchema& schema) {
  const std::string& name = schema.name();
  if (!(name.starts_with("aten::") || name.starts_with("prims::")) || name.find("batch_norm") != std::string::npos ||
      name.find("instance_norm") != std::string::npos) {
    return ~std::uint64_t{0};
  }
  std::uint64_t written = 0;
  for (std::size_t i = 0; i < std::min<std::size_t>(schema.arguments().size(), 64); ++i) {
    const c10::AliasInfo* const alias = schema.arguments()[i].alias_info();
    const bool is_written = alias != nullptr && alias->isWrite() && name != "aten::record_stream";
    written |= std::uint64_t{is_written} << i;
  }
  return written;
}

// Of the operators that have been asked for. A forked child has a table of its own: a reader or a writer of another
// thread may have been in the parent's.
using Table = c10::LeftRight<std::unordered_map<c10::OperatorHandle, OperatorTraits>>;

// An operator's address may become another operator's.
class Forgets final : public c10::OpRegistrationListener {
  void onOperatorRegistered(const c10::OperatorHandle& /*operation*/) override {}
  void onOperatorDeregistered(const c10::OperatorHandle& operation) override {
    PerProcess<Table>::here().write([&](auto& all) { all.erase(operation); });
  }
};

}  // namespace

OperatorTraits OperatorTraits::of(const c10::OperatorHandle& operation) {
  [[maybe_unused]] static const auto* const forgets = new c10::RegistrationHandleRAII(
      c10::Dispatcher::singleton().addRegistrationListener(std::make_unique<Forgets>()));
  Table& table = PerProcess<Table>::here();
  const auto known = table.read([&](const auto& all) {
    const auto found = all.find(operation);
    return found == all.end() ? std::nullopt : std::optional(found->second);
  });
  if (known) {
    return *known;
  }
  const c10::FunctionSchema& schema = operation.schema();
  const OperatorTraits made{kind_of(schema), written_by(schema)};
  table.write([&](auto& all) { all.insert_or_assign(operation, made); });
  return made;
}

}  // namespace ebb

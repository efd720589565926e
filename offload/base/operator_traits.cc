#include "offload/base/operator_traits.h"

#include <algorithm>
#include <array>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>

#include <ATen/core/enum_tag.h>
#include <ATen/core/function_schema.h>
#include <ATen/core/jit_type.h>
#include <c10/util/LeftRight.h>

#include "streams/base/process_mark.h"

namespace ebb {

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

namespace {

using Kind = OperatorTraits::Kind;

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

bool is_core(const std::string& name) { return name.starts_with("aten::") || name.starts_with("prims::"); }

template <std::size_t count>
bool names_one_of(const std::string& name, const std::array<std::string_view, count>& parts) {
  return std::ranges::any_of(parts, [&](std::string_view part) { return name.find(part) != std::string::npos; });
}

bool is_norm_with_statistics(const std::string& name) {
  return names_one_of(name, std::array<std::string_view, 2>{"batch_norm", "instance_norm"});
}

bool is_statistic(const std::string& name, const c10::Argument& argument) {
  return is_norm_with_statistics(name) && argument.name().starts_with("running_");
}

// By argument. Kernels from outside of LibTorch's core need not say what they write to (c10d::allreduce_ does not), and
// neither do those that keep running statistics. The schema of record_stream says so, and the operator writes no bytes.
std::uint64_t written_by(const c10::FunctionSchema& schema) {
  const std::string& name = schema.name();
  if (!is_core(name)) {
    return ~std::uint64_t{0};
  }
  std::uint64_t written = 0;
  for (std::size_t i = 0; i < std::min<std::size_t>(schema.arguments().size(), 64); ++i) {
    const c10::Argument& argument = schema.arguments()[i];
    const c10::AliasInfo* const alias = argument.alias_info();
    const bool is_written = alias != nullptr && alias->isWrite() && name != "aten::record_stream";
    written |= std::uint64_t{is_written || is_statistic(name, argument)} << i;
  }
  return written;
}

// The kernels of batch norms that make nothing of running statistics but new ones, in training.
bool is_known_norm(const std::string& name) {
  constexpr std::array<std::string_view, 3> kKnown{"aten::native_batch_norm", "aten::cudnn_batch_norm",
                                                   "aten::_native_batch_norm_legit"};
  return std::ranges::find(kKnown, name) != kKnown.end();
}

OperatorTraits::Again again_of(const c10::OperatorHandle& operation) {
  using Again = OperatorTraits::Again;
  constexpr std::array<std::string_view, 9> kNever{"aten::resize", "aten::_resize", "aten::set_",
                                                   "rrelu",        "_rnn",          "lstm",
                                                   "gru",          "record_stream", "aten::_local_scalar"};
  const std::string& name = operation.schema().name();
  const bool fills_nothing = names_one_of(name, std::array<std::string_view, 2>{"aten::empty", "aten::new_empty"});
  const bool is_other_norm = is_norm_with_statistics(name) && !is_known_norm(name);
  if (!is_core(name) || fills_nothing || is_other_norm || names_one_of(name, kNever)) {
    return Again::kNo;
  }
  return operation.hasTag(at::Tag::nondeterministic_seeded) ? Again::kDraws : Again::kYes;
}

bool writes_all(const c10::FunctionSchema& schema) {
  constexpr std::array<std::string_view, 9> kFill{"aten::copy_",      "aten::zero_",        "aten::fill_",
                                                  "aten::normal_",    "aten::random_",      "aten::uniform_",
                                                  "aten::bernoulli_", "aten::exponential_", "aten::log_normal_"};
  return schema.overload_name().ends_with("out") || std::ranges::find(kFill, schema.name()) != kFill.end();
}

// Source: the operators that LibTorch's own FLOP counter counts (torch/utils/flop_counter.py), without those of
// backward.
bool is_compute_bound(const std::string& name) {
  constexpr std::array<std::string_view, 6> kParts{"convolution", "attention", "aten::mm", "addmm", "bmm", "_mm"};
  return names_one_of(name, kParts);
}

// Source: the forward operations that alertNotDeterministic is called for, as the documentation of
// torch.use_deterministic_algorithms lists them (LibTorch 2.11).
bool may_vary(const std::string& name) {
  constexpr std::array<std::string_view, 11> kParts{"scatter",      "index_add", "index_put", "index_copy",
                                                    "index_reduce", "aten::put", "histc",     "bincount",
                                                    "cumsum",       "kthvalue",  "max_unpool"};
  return names_one_of(name, kParts);
}

bool is_composite_on(c10::DispatchKey backend, c10::DispatchKey autograd, const c10::OperatorHandle& operation) {
  return operation.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd) &&
         !operation.hasKernelForDispatchKey(backend) && !operation.hasKernelForDispatchKey(autograd) &&
         !operation.hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd);
}

OperatorTraits make_traits(const c10::OperatorHandle& operation) {
  using c10::DispatchKey;
  const c10::FunctionSchema& schema = operation.schema();
  OperatorTraits made;
  made.kind = kind_of(schema);
  made.again = again_of(operation);
  made.makes_views = only_makes_views(schema);
  made.is_composite_on_cpu = is_composite_on(DispatchKey::CPU, DispatchKey::AutogradCPU, operation);
  made.is_composite_on_cuda = is_composite_on(DispatchKey::CUDA, DispatchKey::AutogradCUDA, operation);
  made.is_cast = operation.hasKernelForDispatchKey(DispatchKey::AutocastCPU) ||
                 operation.hasKernelForDispatchKey(DispatchKey::AutocastCUDA);
  made.writes_all = writes_all(schema);
  made.is_compute_bound = is_compute_bound(schema.name());
  made.is_convolution = schema.name().find("convolution") != std::string::npos;
  made.may_vary = may_vary(schema.name());
  made.written = written_by(schema);
  if (const auto training = schema.argumentIndexWithName("training"); training && is_known_norm(schema.name())) {
    made.training = static_cast<std::uint8_t>(*training);
    for (std::size_t i = 0; i < schema.arguments().size(); ++i) {
      made.statistics |= std::uint64_t{is_statistic(schema.name(), schema.arguments()[i])} << i;
    }
  }
  return made;
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
  const OperatorTraits made = make_traits(operation);
  table.write([&](auto& all) { all.insert_or_assign(operation, made); });
  return made;
}

}  // namespace ebb

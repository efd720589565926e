#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>

#include <ATen/core/TensorBase.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <c10/util/intrusive_ptr.h>

// All that differs between the versions of LibTorch that ebb is built against. LibTorch's own declarations tell the
// difference, so that no version is named.

// LibTorch 2.15's engine is asked for hooks that it calls for each new node.
#if __has_include(<torch/csrc/autograd/node_creation_hook.h>)
#define EBB_HAS_NODE_CREATION_HOOKS
#endif

namespace ebb {

// A shared reference to a node of autograd's graph: a std::shared_ptr in LibTorch 2.11, a c10::intrusive_ptr in 2.15.
using NodePtr = std::remove_cvref_t<decltype(std::declval<const at::TensorBase&>().grad_fn())>;

template <typename Pointer>
struct Weak;
template <typename T>
struct Weak<std::shared_ptr<T>> {
  using Type = std::weak_ptr<T>;
};
template <typename T, typename Null>
struct Weak<c10::intrusive_ptr<T, Null>> {
  using Type = c10::weak_intrusive_ptr<T, Null>;
};
using WeakNodePtr = Weak<NodePtr>::Type;

// What LibTorch's errors call a node: the node's name in LibTorch 2.11, the name of its forward operation in 2.15.
template <typename Node>
std::string name_in_errors(const Node& node) {
  if constexpr (requires { node.forward_op_name(); }) {
    return node.forward_op_name();
  } else {
    return node.name();
  }
}

// A kind of entry on the stack of c10::ThreadLocalDebugInfo: a number in LibTorch 2.11, a name's address in 2.15.
template <typename Kind = c10::DebugInfoKind>
constexpr Kind debug_info_kind(std::uint8_t number, const std::string_view* name) {
  if constexpr (std::is_enum_v<Kind>) {
    return static_cast<Kind>(number);
  } else {
    return Kind(name);
  }
}

}  // namespace ebb

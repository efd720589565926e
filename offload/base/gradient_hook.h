#pragma once

#include <cstdint>
#include <functional>

#include <ATen/core/Tensor.h>

namespace ebb {

// kBeforeToo: before the hook that the leaf has from the program, if there is one, and once more after it.
enum class WhenCalled : std::uint8_t { kAfter, kBeforeToo };

// Has `call` be called with the leaf each time that backward has accumulated a gradient in the leaf, after the hook
// that the leaf has from the program, if any. The leaf need not require a gradient yet. `owner` names the call: a
// second call of one owner replaces the first. The calls live as long as the leaf, or until the program gives the leaf
// another hook in C++.
//
// Threads: one at a time for a leaf, and not while a backward pass reaches the leaf. `call` is called on autograd's
// threads.
void after_each_gradient(const at::Tensor& leaf, const void* owner, std::function<void(const at::Tensor&)> call,
                         WhenCalled when = WhenCalled::kAfter);

// Takes the owner's call away.
void leave_gradients_alone(const at::Tensor& leaf, const void* owner);

}  // namespace ebb

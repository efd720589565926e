#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>

#include <torch/csrc/autograd/saved_variable_hooks.h>

#include "test/random/operation.h"

namespace ebb::graphs {

// Saved-tensor hooks that are not ebb's, as programs and other libraries have them. Each makes its own hook for every
// save, counts the calls of its hooks, and lets some of them fail.
class ForeignHooks {
 public:
  virtual ~ForeignHooks() = default;
  [[nodiscard]] virtual std::unique_ptr<torch::autograd::SavedVariableHooks> make() = 0;
};

// Has the calling thread's saves go to `hooks` while it lives, and with null to whoever is asked without them: as for
// Python's default hooks, the innermost scope wins. The first one puts an engine on top of ebb's.
class ForeignScope {
 public:
  explicit ForeignScope(ForeignHooks* hooks);
  ~ForeignScope();
  ForeignScope(const ForeignScope&) = delete;
  ForeignScope& operator=(const ForeignScope&) = delete;

 private:
  ForeignHooks* const before_;
};

// Calls that a program can see.
struct Calls {
  std::atomic<std::uint64_t> packs{0};
  std::atomic<std::uint64_t> unpacks{0};
  std::atomic<std::uint64_t> runs{0};  // of a region's function
};

// Hooks that hold copies, hand each out once only, raise, or compute without gradients, by `number`.
[[nodiscard]] std::unique_ptr<ForeignHooks> foreign_hooks(std::uint32_t number, std::shared_ptr<Calls> calls);

// Runs `function` as torch.utils.checkpoint does, of the kind without reentry or of the kind with.
using RegionFunction = std::function<at::Tensor(const Tensors&)>;
[[nodiscard]] at::Tensor checkpoint_by_hooks(const RegionFunction& function, const Tensors& inputs,
                                             const std::shared_ptr<Calls>& calls);
[[nodiscard]] at::Tensor checkpoint_by_reentry(const RegionFunction& function, const Tensors& inputs,
                                               const std::shared_ptr<Calls>& calls);

}  // namespace ebb::graphs

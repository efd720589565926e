#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

namespace ebb {

// The cost of recomputing a storage's bytes in backward, from the saves of the operation that made the bytes.
enum class Recompute : std::uint8_t {
  kNo,            // the bytes cannot be recomputed, or no recipe is known
  kMemoryBound,   // about a pass over its inputs: elementwise operations, norms
  kComputeBound,  // arithmetic that grows faster than the bytes: matmul, attention, convolution
};

// The most recipes that run one inside the other. This depth serves a transformer's block, and bounds the work that one
// use in backward may set off.
inline constexpr int kMaxRecipeDepth = 16;

// The facts about one storage that autograd saves, at the moment of its first save.
struct Candidate {
  std::uint64_t bytes = 0;     // of the whole storage, which is the unit that moves
  std::uint64_t ordinal = 0;   // how many candidates of this step came before
  std::string_view operation;  // name of the autograd node that made the tensor ("MmBackward0"), "" if none; valid
                               // during decide; filled in only for policies whose needs_operation() is true
  Recompute recompute = Recompute::kNo;  // filled in only for policies whose needs_recompute() is true
};

enum class Decision : std::uint8_t {
  kKeep,       // stays in device memory
  kOffload,    // leaves for the tier, if the tier has room
  kRecompute,  // is dropped, and recomputed when backward asks for it; kept where Candidate::recompute is kNo
};

// How often a policy that looks for storages of one kind was asked, and how often it has found such a storage.
struct Matches {
  std::string_view policy;    // the name of the policy's factory; lives as long as the process
  std::uint64_t asked = 0;    // storages that the policy was asked about
  std::uint64_t matched = 0;  // of the storages asked about, those of the kind
};

// Decides what becomes of a storage. Policies compose by wrapping: each wrapper decides about the storages that it has
// a reason for, and asks the policy inside it about the others.
//
// Threads: an Offloader calls its policy from any thread, but never from two at once. The Offloader holds a lock
// meanwhile, so a policy must not go backward, nor end the Offloader. An operation whose tensors autograd would save
// throws c10::Error there, unless it is under a NoOpGuard. A policy with state belongs to one Offloader; where several
// threads share the Offloader, the policy sees their steps mixed.
class Policy {
 public:
  virtual ~Policy() = default;

  // Notes that the next decision begins a new step: the ordinals start again at 0. For a policy a step is one forward
  // pass, which ends when backward begins or when the pass is dropped without a backward. Wrappers pass the call on.
  virtual void begin_step() = 0;

  // Notes that no backward will follow the decisions since begin_step: the forward pass was evaluation, or was dropped.
  // A policy must not learn from these decisions. Wrappers pass the call on.
  virtual void drop_step() {}

  // Decides about one storage. The call runs inside the forward pass, once for each storage, so it must be quick. An
  // exception reaches the forward pass.
  [[nodiscard]] virtual Decision decide(const Candidate& candidate) = 0;

  // Whether `Candidate::operation` must be filled in, which costs a string for each save.
  [[nodiscard]] virtual bool needs_operation() const = 0;

  // Whether storages may be recomputed at all, and `Candidate::recompute` must be filled in, which costs a few
  // allocations for each save. Must return the same value at each call.
  [[nodiscard]] virtual bool needs_recompute() const { return false; }

  // Storages of fewer bytes are kept without asking the policy, which costs a quarter of asking. Must return the same
  // value at each call. A wrapper that counts the storages that it is asked about, or looks at more than sizes, returns
  // 0.
  [[nodiscard]] virtual std::uint64_t least_bytes() const { return 0; }

  // The matches of this policy and of the policies inside it since they were made, the outermost first. Policies that
  // look for no kind of storage, and policies that were never asked, are left out.
  [[nodiscard]] virtual std::vector<Matches> matches() const { return {}; }
};

}  // namespace ebb

#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

namespace ebb {

// What it would take to compute a storage's bytes again in backward, from what the operation that made them has saved.
enum class Recompute : std::uint8_t {
  kNo,            // that cannot be done, or it is not known how
  kMemoryBound,   // about a pass over its inputs: elementwise operations, norms
  kComputeBound,  // arithmetic that grows faster than the bytes: matmul, attention, convolution
};

// Recipes inside recipes: what silu, mul and norms in a row need, and an end to what one use in backward may set off.
inline constexpr int kMaxRecipeDepth = 8;

// The facts about one storage that autograd saves, at the moment of its first save.
struct Candidate {
  std::uint64_t bytes = 0;     // of the whole storage, which is what would be moved
  std::uint64_t ordinal = 0;   // how many storages this step has asked about before it
  std::string_view operation;  // name of the autograd node that made the tensor ("MmBackward0"), "" if none; valid
                               // during decide; filled in only for policies whose needs_operation() is true
  bool region = false;  // a checkpointed region that begins, and not a storage: no bytes are known of it. It is kept or
                        // recomputed. Only policies that plan are asked about these
  Recompute recompute = Recompute::kNo;  // filled in only for policies whose needs_recompute() is true
};

enum class Decision : std::uint8_t {
  kKeep,       // stays in device memory
  kOffload,    // leaves for the tier, if the tier has room
  kRecompute,  // is dropped, and made again when backward asks for it; kept where Candidate::recompute is kNo
};

// How often a policy that looks for storages of a kind has found some.
struct Matches {
  std::string_view policy;    // as its factory is named; lives as long as the process
  std::uint64_t asked = 0;    // storages that it was asked about
  std::uint64_t matched = 0;  // of those, the ones of that kind
};

// Decides what becomes of a storage. Policies compose by wrapping: each has one reason to keep a storage and asks
// the policy inside it about the rest.
//
// Threads: an Offloader calls its policy from any thread, but never from two at once: it holds a lock meanwhile, so a
// policy must not do what autograd would save. One with a state of its own belongs to one Offloader, and where several
// threads share that, their steps mix.
class Policy {
 public:
  virtual ~Policy() = default;

  // A new step begins, with the decision that follows: the ordinals start again at 0. A step is one forward pass: it
  // ends when backward begins, or when it was dropped without. Wrappers pass it on.
  virtual void begin_step() = 0;

  // What was decided since begin_step was for a forward pass that has been dropped, or was none: it is nothing to learn
  // from. Wrappers pass it on.
  virtual void drop_step() {}

  // Must be quick: it runs inside the forward pass, once for each storage. What it throws reaches the forward pass.
  [[nodiscard]] virtual Decision decide(const Candidate& candidate) = 0;

  // Whether `Candidate::operation` must be filled in (it costs a string for each save).
  [[nodiscard]] virtual bool needs_operation() const = 0;

  // Whether `Candidate::recompute` must be filled in (it costs a few allocations for each save), and storages may be
  // recomputed at all. The same at each call.
  [[nodiscard]] virtual bool needs_recompute() const { return false; }

  // Storages of fewer bytes are kept without being asked about, which costs a quarter of asking. The same at each call.
  // A wrapper that counts what it is asked about, or looks at more than sizes, leaves it at 0.
  [[nodiscard]] virtual std::uint64_t least_bytes() const { return 0; }

  // Of this policy and those inside it, the outermost first, since they were made; without those that look for nothing
  // in particular, and those that were never asked. Wrappers pass it on.
  [[nodiscard]] virtual std::vector<Matches> matches() const { return {}; }
};

}  // namespace ebb

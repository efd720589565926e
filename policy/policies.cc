#include "policy/policies.h"

#include <optional>
#include <stdexcept>
#include <utility>
#include <vector>

namespace ebb {
namespace {

// Decides the same about every storage.
class Always final : public Policy {
 public:
  Always(Decision decision, std::uint64_t least_bytes) : decision_(decision), least_bytes_(least_bytes) {}
  void begin_step() override {}
  [[nodiscard]] Decision decide(const Candidate& /*candidate*/) override { return decision_; }
  [[nodiscard]] bool needs_operation() const override { return false; }
  [[nodiscard]] std::uint64_t least_bytes() const override { return least_bytes_; }

 private:
  const Decision decision_;
  const std::uint64_t least_bytes_;
};

// Wraps another policy: decides about the storages that its rule has an answer for, and asks the inner policy about the
// others. A rule sees no steps: a policy with state of a step is a Policy of its own.
class Wrapper final : public Policy {
 public:
  struct Kind {
    const char* name;  // the factory's, a literal
    bool needs_operation = false;
    bool needs_recompute = false;
    std::uint64_t least_bytes = 0;
  };
  // A rule that looks for storages of one kind sets `matched`, for matches().
  using Rule = std::function<std::optional<Decision>(const Candidate& candidate, std::optional<bool>& matched)>;

  Wrapper(const Kind& kind, std::shared_ptr<Policy> inner, Rule rule)
      : kind_(kind), inner_(std::move(inner)), rule_(std::move(rule)) {
    if (inner_ == nullptr) {
      throw std::invalid_argument(std::string(kind.name) +
                                  ": the inner policy is null; offload_everything() is the plainest");
    }
  }

  void begin_step() override { inner_->begin_step(); }
  void drop_step() override { inner_->drop_step(); }
  [[nodiscard]] Decision decide(const Candidate& candidate) override {
    std::optional<bool> matched;
    const std::optional<Decision> decision = rule_(candidate, matched);
    asked_ += matched ? 1 : 0;
    matched_ += matched.value_or(false) ? 1 : 0;
    return decision ? *decision : inner_->decide(candidate);
  }
  [[nodiscard]] bool needs_operation() const override { return kind_.needs_operation || inner_->needs_operation(); }
  [[nodiscard]] bool needs_recompute() const override { return kind_.needs_recompute || inner_->needs_recompute(); }
  [[nodiscard]] std::uint64_t least_bytes() const override { return kind_.least_bytes; }
  [[nodiscard]] std::vector<Matches> matches() const override {
    std::vector<Matches> found = inner_->matches();
    if (asked_ > 0) {
      found.insert(found.begin(), {kind_.name, asked_, matched_});
    }
    return found;
  }

 private:
  const Kind kind_;
  const std::shared_ptr<Policy> inner_;
  const Rule rule_;
  std::uint64_t asked_ = 0;
  std::uint64_t matched_ = 0;
};

// Keeps the storages that one of the named operations made, or those that none of them made.
std::shared_ptr<Policy> keep_if_listed(const char* factory, bool listed, OperationNames names,
                                       std::shared_ptr<Policy> inner) {
  return std::make_shared<Wrapper>(
      Wrapper::Kind{.name = factory, .needs_operation = true}, std::move(inner),
      [listed, names = std::move(names)](const Candidate& candidate, std::optional<bool>& matched) {
        matched = names.contains(candidate.operation);
        return *matched == listed ? std::optional(Decision::kKeep) : std::nullopt;
      });
}

}  // namespace

std::shared_ptr<Policy> offload_everything() { return std::make_shared<Always>(Decision::kOffload, 0); }

std::shared_ptr<Policy> keep_everything(std::uint64_t least_bytes) {
  return std::make_shared<Always>(Decision::kKeep, least_bytes);
}

std::shared_ptr<Policy> minimum_size(std::uint64_t bytes, std::shared_ptr<Policy> inner) {
  constexpr std::uint64_t kLargestSize = std::uint64_t{1} << 56;
  if (bytes > kLargestSize) {  // a negative number arrives as almost 2^64, and would silently keep everything
    throw std::invalid_argument("minimum_size: " + std::to_string(static_cast<std::int64_t>(bytes)) +
                                " bytes is no size; it must be between 0 and 2^56");
  }
  return std::make_shared<Wrapper>(Wrapper::Kind{.name = "minimum_size", .least_bytes = bytes}, std::move(inner),
                                   [bytes](const Candidate& candidate, std::optional<bool>& /*matched*/) {
                                     return candidate.bytes < bytes ? std::optional(Decision::kKeep) : std::nullopt;
                                   });
}

std::shared_ptr<Policy> only_operations(OperationNames names, std::shared_ptr<Policy> inner) {
  return keep_if_listed("only_operations", /*listed=*/false, std::move(names), std::move(inner));
}

std::shared_ptr<Policy> except_operations(OperationNames names, std::shared_ptr<Policy> inner) {
  return keep_if_listed("except_operations", /*listed=*/true, std::move(names), std::move(inner));
}

std::shared_ptr<Policy> recompute(Recompute dearest, std::shared_ptr<Policy> inner) {
  return std::make_shared<Wrapper>(Wrapper::Kind{.name = "recompute", .needs_recompute = true}, std::move(inner),
                                   [dearest](const Candidate& candidate, std::optional<bool>& matched) {
                                     matched = candidate.recompute != Recompute::kNo && candidate.recompute <= dearest;
                                     return *matched ? std::optional(Decision::kRecompute) : std::nullopt;
                                   });
}

std::shared_ptr<Policy> callback(std::function<Decision(const Candidate&)> function, std::shared_ptr<Policy> inner) {
  if (!function) {
    throw std::invalid_argument("callback: the function is empty");
  }
  return std::make_shared<Wrapper>(
      Wrapper::Kind{.name = "callback", .needs_operation = true}, std::move(inner),
      [function = std::move(function)](const Candidate& candidate, std::optional<bool>& /*matched*/) {
        const Decision decision = function(candidate);
        return decision == Decision::kOffload ? std::nullopt : std::optional(decision);
      });
}

}  // namespace ebb

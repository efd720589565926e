#include "policy/policies.h"

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

// The base of every policy that wraps another: holds the inner policy and passes each new step on to it.
class Wrapper : public Policy {
 public:
  void begin_step() override { inner_->begin_step(); }
  void drop_step() override { inner_->drop_step(); }
  [[nodiscard]] bool needs_operation() const override { return inner_->needs_operation(); }
  [[nodiscard]] bool needs_recompute() const override { return inner_->needs_recompute(); }
  [[nodiscard]] std::vector<Matches> matches() const override {
    std::vector<Matches> found = inner_->matches();
    if (asked_ > 0) {
      found.insert(found.begin(), {name_, asked_, matched_});
    }
    return found;
  }

 protected:
  // `name` is the factory's, a literal: for matches(), and for the std::invalid_argument thrown when `inner` is null.
  Wrapper(const char* name, std::shared_ptr<Policy> inner) : name_(name), inner_(std::move(inner)) {
    if (inner_ == nullptr) {
      throw std::invalid_argument(std::string(name) +
                                  ": the inner policy is null; offload_everything() is the plainest");
    }
  }

  [[nodiscard]] Policy& inner() { return *inner_; }

  // Counts a storage that the policy was asked about, and returns `matched`: whether it is of the kind that the policy
  // looks for.
  bool count(bool matched) {
    ++asked_;
    matched_ += matched ? 1 : 0;
    return matched;
  }

 private:
  const char* const name_;
  const std::shared_ptr<Policy> inner_;
  std::uint64_t asked_ = 0;
  std::uint64_t matched_ = 0;
};

class MinimumSize final : public Wrapper {
 public:
  MinimumSize(std::uint64_t bytes, std::shared_ptr<Policy> inner)
      : Wrapper("minimum_size", std::move(inner)), bytes_(bytes) {
    constexpr std::uint64_t kLargestSize = std::uint64_t{1} << 56;
    if (bytes > kLargestSize) {  // a negative number arrives as almost 2^64, and would silently keep everything
      throw std::invalid_argument("minimum_size: " + std::to_string(static_cast<std::int64_t>(bytes)) +
                                  " bytes is no size; it must be between 0 and 2^56");
    }
  }
  [[nodiscard]] Decision decide(const Candidate& candidate) override {
    return candidate.bytes < bytes_ ? Decision::kKeep : inner().decide(candidate);
  }
  [[nodiscard]] std::uint64_t least_bytes() const override { return bytes_; }

 private:
  const std::uint64_t bytes_;
};

class Operation final : public Wrapper {
 public:
  enum class Listed : std::uint8_t {
    kPass,  // storages of named operations go to the inner policy, the others are kept
    kKeep,  // storages of named operations are kept, the others go to the inner policy
  };

  Operation(const char* factory, Listed listed, OperationNames names, std::shared_ptr<Policy> inner)
      : Wrapper(factory, std::move(inner)), listed_(listed), names_(std::move(names)) {}
  [[nodiscard]] Decision decide(const Candidate& candidate) override {
    const bool is_listed = count(names_.find(candidate.operation) != names_.end());
    return is_listed == (listed_ == Listed::kPass) ? inner().decide(candidate) : Decision::kKeep;
  }
  [[nodiscard]] bool needs_operation() const override { return true; }

 private:
  const Listed listed_;
  const OperationNames names_;
};

class Recomputing final : public Wrapper {
 public:
  Recomputing(Recompute dearest, std::shared_ptr<Policy> inner)
      : Wrapper("recompute", std::move(inner)), dearest_(dearest) {}
  [[nodiscard]] Decision decide(const Candidate& candidate) override {
    const bool drops = candidate.recompute != Recompute::kNo && candidate.recompute <= dearest_;
    return count(drops) ? Decision::kRecompute : inner().decide(candidate);
  }
  [[nodiscard]] bool needs_recompute() const override { return true; }

 private:
  const Recompute dearest_;
};

class Callback final : public Wrapper {
 public:
  Callback(std::function<Decision(const Candidate&)> function, std::shared_ptr<Policy> inner)
      : Wrapper("callback", std::move(inner)), function_(std::move(function)) {
    if (!function_) {
      throw std::invalid_argument("callback: the function is empty");
    }
  }
  [[nodiscard]] Decision decide(const Candidate& candidate) override {
    const Decision decision = function_(candidate);
    return decision == Decision::kOffload ? inner().decide(candidate) : decision;
  }
  [[nodiscard]] bool needs_operation() const override { return true; }

 private:
  const std::function<Decision(const Candidate&)> function_;
};

}  // namespace

std::shared_ptr<Policy> offload_everything() { return std::make_shared<Always>(Decision::kOffload, 0); }

std::shared_ptr<Policy> keep_everything(std::uint64_t least_bytes) {
  return std::make_shared<Always>(Decision::kKeep, least_bytes);
}

std::shared_ptr<Policy> minimum_size(std::uint64_t bytes, std::shared_ptr<Policy> inner) {
  return std::make_shared<MinimumSize>(bytes, std::move(inner));
}

std::shared_ptr<Policy> only_operations(OperationNames names, std::shared_ptr<Policy> inner) {
  return std::make_shared<Operation>("only_operations", Operation::Listed::kPass, std::move(names), std::move(inner));
}

std::shared_ptr<Policy> except_operations(OperationNames names, std::shared_ptr<Policy> inner) {
  return std::make_shared<Operation>("except_operations", Operation::Listed::kKeep, std::move(names), std::move(inner));
}

std::shared_ptr<Policy> recompute(Recompute dearest, std::shared_ptr<Policy> inner) {
  return std::make_shared<Recomputing>(dearest, std::move(inner));
}

std::shared_ptr<Policy> callback(std::function<Decision(const Candidate&)> function, std::shared_ptr<Policy> inner) {
  return std::make_shared<Callback>(std::move(function), std::move(inner));
}

}  // namespace ebb

// The machine of random graphs itself: what it makes is what its seed says, and it sees what it is there to see.

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <catch2/catch.hpp>

#include "test/random/check.h"
#include "test/random/generator.h"
#include "test/random/interpreter.h"
#include "test/random/proof.h"
#include "test/random/record.h"
#include "test/random/shrinker.h"

namespace ebb::graphs {
namespace {

const c10::Device kCpu(c10::kCPU);

std::string text_of(const Case& made) { return to_text(made.setting) + "\n" + to_text(made.program); }

Instruction line(int id, const char* name, std::vector<int> operands, Numbers numbers = {}) {
  Instruction made;
  made.operation = &operation(name);
  made.id = id;
  made.operands = std::move(operands);
  made.numbers = numbers;
  return made;
}

// Nothing but the last source of a copy stays on the device, so that backward has to copy in.
Setting moving() {
  Setting setting;
  setting.stash_bytes = 1;
  return setting;
}

Outcome outcome_of(Record record) {
  record.settle();
  Outcome outcome(1);
  outcome[0].push_back(std::move(record));
  return outcome;
}

std::string difference_of(const at::Tensor& expected, const at::Tensor& found) {
  return difference(outcome_of(Record(1, "value", expected)), outcome_of(Record(1, "value", found))).value_or("none");
}

// A tier with something wrong.
class BrokenTier final : public Tier {
 public:
  enum class Fault : std::uint8_t { kFlippedBit, kDoneTooEarly };

  BrokenTier(std::shared_ptr<Tier> tier, Fault fault) : tier_(std::move(tier)), fault_(fault) {}

  [[nodiscard]] c10::Device device() const override { return tier_->device(); }
  [[nodiscard]] c10::Stream current_stream() const override { return tier_->current_stream(); }
  [[nodiscard]] Ticket record(c10::Stream stream) override { return tier_->record(stream); }
  [[nodiscard]] std::optional<Block> try_acquire(std::size_t bytes) override { return tier_->try_acquire(bytes); }
  Ticket copy_out(const Block& to, const void* from, const After& after) override {
    return tier_->copy_out(to, from, after);
  }
  Ticket copy_in(void* to, const Block& from, const After& after) override {
    Ticket arrived = tier_->copy_in(to, from, after);
    if (fault_ == Fault::kDoneTooEarly) {
      return nullptr;
    }
    if (++copies_ % 3 == 0) {
      arrived->synchronize();
      static_cast<unsigned char*>(to)[from.size() - 1] ^= 0x40;
    }
    return arrived;
  }
  [[nodiscard]] PoolStats pool_stats() const override { return tier_->pool_stats(); }
  [[nodiscard]] StallStats stall_stats() const override { return tier_->stall_stats(); }

 protected:
  void make_wait(c10::Stream stream, const Ticket& ticket) override { tier_->wait(WaitPoint::kCaller, stream, ticket); }
  [[nodiscard]] c10::DataPtr take_memory(std::size_t bytes, c10::Stream stream) override {
    return tier_->allocate(bytes, stream);
  }

 private:
  const std::shared_ptr<Tier> tier_;
  const Fault fault_;
  std::atomic<int> copies_{0};
};

WrapTier broken(BrokenTier::Fault fault) {
  return [fault](std::shared_ptr<Tier> tier) { return std::make_shared<BrokenTier>(std::move(tier), fault); };
}

TEST_CASE("a seed and a number always give the same case, and other numbers another") {
  for (const std::uint64_t number : {0, 7, 1000}) {
    CHECK(text_of(generate(3, number, kCpu)) == text_of(generate(3, number, kCpu)));
    CHECK(text_of(generate(3, number, kCpu)) != text_of(generate(3, number + 1, kCpu)));
    CHECK(text_of(generate(3, number, kCpu)) != text_of(generate(4, number, kCpu)));
  }
}

TEST_CASE("a program's text says what it does") {
  Instruction gradient = line(3, "grad", {2}, {kRetain | kCreate, 5, 0});
  gradient.inputs = {0, 1};
  const Program program{{{line(0, "leaf", {}, {0, 1, 9}), line(1, "guard", {}), line(2, "softmax", {0}, {1, 0, 0}),
                          std::move(gradient), line(4, "backward", {3})}}};
  CHECK(to_text(program) ==
        "  thread 0:\n"
        "    v0 = leaf({4, 4}, Double, /*values=*/9);\n"
        "    guard(offloader 0);\n"
        "    v2 = softmax(v0, 1, 0, 0);\n"
        "    v3 = grad({v2}, {v0, v1}, retain_graph, create_graph);\n"
        "    backward({v3});\n");
}

TEST_CASE("a comparison sees a flipped bit, other strides, another type and a value that is not there") {
  const at::Tensor tensor = at::arange(12, at::kFloat).view({3, 4});
  CHECK(difference_of(tensor, tensor.clone()) == "none");
  at::Tensor flipped = tensor.clone();
  static_cast<unsigned char*>(flipped.mutable_data_ptr())[17] ^= 1;
  CHECK_THAT(difference_of(tensor, flipped), Catch::Contains("bytes differ from byte 17 of 48"));
  CHECK_THAT(difference_of(tensor, tensor.t().contiguous().t()), Catch::Contains("strides [1, 3]"));
  CHECK_THAT(difference_of(tensor, tensor.to(at::kInt)), Catch::Contains("Int"));
  CHECK_THAT(difference_of(tensor, {}), Catch::Contains("undefined"));
  CHECK_THAT(difference(outcome_of(Record(1, "value", tensor)), Outcome(1)).value_or(""),
             Catch::Contains("value of v1 is missing"));
  const at::Tensor nan = at::full({2}, std::numeric_limits<float>::quiet_NaN());
  CHECK(difference_of(nan, nan.clone()) == "none");
}

TEST_CASE("a comparison sees an error that is missing, too much, or of another text") {
  const auto error = [](const char* text) { return outcome_of(Record(1, std::string(text))); };
  const Outcome value = outcome_of(Record(1, "value", at::ones({})));
  CHECK(difference(error("a"), error("a")) == std::nullopt);
  CHECK(difference(error("a"), error("b")).has_value());
  CHECK(difference(error("a"), value).has_value());
  CHECK(difference(value, error("a")).has_value());
  CHECK(difference(error("[x], which is output 0 of N<(a)::B>, is at version 1"), error("[x] is at version 1")) ==
        std::nullopt);
}

TEST_CASE("a graph that is still there is seen as something left") {
  Rig rig(moving(), kCpu);
  std::optional<Interpreter> alive;
  const Tensors shared = make_shared_tensors(kCpu);
  alive.emplace(Ground{kCpu, rig.offloaders(), {}}, shared);
  alive->step(line(0, "leaf", {}));
  alive->step(line(1, "scale", {0}));
  alive->step(line(2, "guard", {}));
  CHECK(rig.leftover() == std::nullopt);
  alive->step(line(3, "sin", {1}));
  CHECK(rig.leftover().value_or("nothing") == "4096 bytes left: pool");
  alive.reset();
  CHECK(rig.leftover() == std::nullopt);
}

TEST_CASE("what plain autograd refuses is expected of ebb, word for word") {
  Case tested;
  tested.setting = moving();
  tested.program.threads = {{line(0, "leaf", {}), line(1, "scale", {0}), line(2, "guard", {}), line(3, "sin", {1}),
                             line(4, "zero_", {1}), line(5, "backward", {3})}};
  const Verdict verdict = check(tested, kCpu);
  CHECK(verdict.wrong == std::nullopt);
  CHECK(verdict.tally.errors == 1);
  CHECK(verdict.tally.offloaded == 1);
}

// sin saves v1 for a pass of its own; what is then written has been saved by v2's node as well.
Program written_before(bool written) {
  Thread lines{line(0, "leaf", {}), line(1, "scale", {0}), line(2, "silu", {1}), line(3, "sin", {2})};
  if (written) {
    lines.push_back(line(4, "zero_", {1}));
  }
  lines.push_back(line(5, "backward", {3}));
  return {{std::move(lines)}};
}

std::string refusal_of(const Program& program) {
  const Outcome outcome = run(program, Ground{kCpu, {}, {}});
  for (const Record& record : outcome.at(0)) {
    if (record.is_error()) {
      return record.text();
    }
  }
  return {};
}

TEST_CASE("a refusal is proven by a node whose save was written to, and by nothing else") {
  const std::string error = refusal_of(written_before(true));
  REQUIRE_THAT(error, Catch::Contains("is at version 1; expected version 0"));
  const Outcome nothing(1);
  CHECK(plain_refuses_too(written_before(true), nothing, Difference{"", 0, 5, error}, kCpu));
  CHECK_FALSE(plain_refuses_too(written_before(false), nothing, Difference{"", 0, 5, error}, kCpu));
  std::string of_another_version = error;
  of_another_version.replace(error.find("version 1"), 9, "version 2");
  CHECK_FALSE(plain_refuses_too(written_before(true), nothing, Difference{"", 0, 5, of_another_version}, kCpu));
}

TEST_CASE("that memory was taken is proven by a node that has saved it, and by nothing else") {
  const auto swapped = [](int victim) {
    return Program{{{line(0, "leaf", {}), line(1, "leaf", {}, {1, 0, 5}), line(2, "sin", {0}),
                     line(3, "swap_data", {victim, victim}), line(5, "backward", {2})}}};
  };
  CHECK_FALSE(saved_memory_was_taken(swapped(1), Outcome(1), Difference{"", 0, 5, ""}, kCpu));
  const Program refilled{
      {{line(0, "leaf", {}), line(2, "sin", {0}), line(3, "refill", {0}), line(5, "backward", {2})}}};
  CHECK(saved_memory_was_taken(refilled, Outcome(1), Difference{"", 0, 5, ""}, kCpu));
}

TEST_CASE("a write to gradients is followed by a look at all that is alive") {
  const Tensors shared = make_shared_tensors(kCpu);
  Interpreter interpreter(Ground{kCpu, {}, {}}, shared);
  for (const Instruction& each :
       {line(0, "leaf", {}), line(1, "sin", {0}), line(2, "backward", {1}), line(3, "zero_gradients", {})}) {
    interpreter.step(each);
  }
  std::vector<std::string> names;
  for (const Record& record : interpreter.records()) {
    names.push_back(record.name());
  }
  CHECK(names == std::vector<std::string>{"value seen by 3, of v0", "value seen by 3, of v1", "value seen by 3, of v2",
                                          "leaf seen by 3, of v0", "gradient seen by 3, of v0"});
}

TEST_CASE("a shrinker keeps the one line that is at fault, and no setting that is not") {
  for (std::uint64_t number = 0, shrunk = 0; shrunk < 3; ++number) {
    const Case whole = generate(11, number, kCpu);
    const auto fails = [](const Case& tested) {
      return tested.setting.stash_bytes && to_text(tested.program).find("= tanh(") != std::string::npos;
    };
    if (fails(whole)) {
      const Case small = shrink(whole, fails);
      INFO(text_of(small));
      CHECK(instructions(small.program) == 1);
      CHECK(small.program.threads.at(0).at(0).operation->name == "tanh");
      CHECK(small.setting.stash_bytes == whole.setting.stash_bytes);
      CHECK(small.setting.passes == 1);
      CHECK(small.setting.policy == Choice::kEverything);
      ++shrunk;
    }
  }
}

TEST_CASE("a shrinker redirects the users of what it removes") {
  Case whole;
  whole.program.threads = {
      {line(0, "leaf", {}), line(1, "sin", {0}), line(2, "cos", {1}), line(3, "exp", {2}), line(4, "tanh", {3})}};
  const Tensors shared = make_shared_tensors(kCpu);
  const Case small = shrink(whole, [&](const Case& tested) {  // fails as long as tanh is computed of anything
    Interpreter interpreter(Ground{}, shared);
    at::Tensor last;
    for (const Instruction& each : tested.program.threads.at(0)) {
      last = interpreter.step(each);
    }
    return last.defined() && to_text(tested.program).find("= tanh(") != std::string::npos;
  });
  CHECK(to_text(small.program) ==
        "  thread 0:\n"
        "    v0 = leaf({4, 4}, Float, /*values=*/0);\n"
        "    v4 = tanh(v0, 0, 0, 0);\n");
}

TEST_CASE("a tier that flips a bit, or says too early that a copy is done, is caught, and a sound one is not") {
  const auto fault = GENERATE(BrokenTier::Fault::kFlippedBit, BrokenTier::Fault::kDoneTooEarly);
  int caught = 0;
  for (std::uint64_t number = 0; number < 50; ++number) {
    Case made = generate(5, number, kCpu);
    made.setting = moving();
    CHECK(check(made, kCpu).wrong.value_or("right") == "right");
    caught += check(made, kCpu, broken(fault)).wrong.has_value() ? 1 : 0;
  }
  CHECK(caught >= 5);
}

TEST_CASE("a fault of the tier shrinks to a few lines that still show it") {
  const WrapTier wrap = broken(BrokenTier::Fault::kDoneTooEarly);
  for (std::uint64_t number = 0;; ++number) {
    Case made = generate(6, number, kCpu);
    made.setting = moving();
    if (instructions(made.program) < 15 || !check(made, kCpu, wrap).wrong) continue;
    const Case small = shrink(made, [&](const Case& tested) { return check(tested, kCpu, wrap).wrong.has_value(); });
    INFO(text_of(small));
    CHECK(instructions(small.program) <= 8);
    CHECK(check(small, kCpu, wrap).wrong.has_value());
    CHECK(check(small, kCpu).wrong.value_or("right") == "right");
    break;
  }
}

}  // namespace
}  // namespace ebb::graphs

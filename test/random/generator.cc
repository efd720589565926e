#include "test/random/generator.h"

#include <algorithm>
#include <array>
#include <optional>
#include <set>
#include <vector>

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>

#include "test/random/interpreter.h"
#include "test/random/random.h"

namespace ebb::graphs {
namespace {

constexpr std::int64_t kMostElements = 2048;
constexpr double kLargestValue = 50;

// What kind of program it is to be. One with all things in it would fail in each backward.
struct Style {
  std::size_t write_chance;   // percent of lines that write
  bool legal_writes;          // only into what nobody has used yet
  std::size_t foreign_types;  // percent of tensors made that are not float
  bool derives_twice;
  bool writes_gradients;      // after backward
  std::size_t return_chance;  // percent of lines whose backward returns what was saved
  std::size_t data_chance;    // percent of lines that give tensors other memory
  bool regions;               // checkpointed ones, whose inputs nobody may write to
  bool foreign_hooks;         // of the program's own, which check no versions
};

bool usable(const at::Tensor& tensor) {
  const at::NoGradGuard no_grad;
  if (!tensor.defined() || tensor.numel() > kMostElements) return false;
  if (tensor.numel() == 0 || !(tensor.is_floating_point() || tensor.is_complex())) return true;
  const at::Tensor largest = tensor.detach().abs().to(at::kDouble).max();
  return largest.item<double>() <= kLargestValue;  // false for NaN
}

class ThreadWriter {
 public:
  ThreadWriter(Random& random, const Style& style, std::size_t length)
      : random_(random),
        style_(style),
        length_(length),
        shared_(make_shared_tensors(c10::Device(c10::kCPU))),
        interpreter_(Ground{}, shared_) {}

  Thread write() {
    make("leaf");
    make("leaf");
    if (random_.percent(90)) scope("guard");
    while (lines_.size() < length_) {
      add_line();
    }
    end();
    interpreter_.finish();
    return std::move(lines_);
  }

 private:
  struct Value {
    int id;
    at::Tensor tensor;
    bool used = false;
  };

  void add_line() {
    // Plain autograd takes over what some of them return, and then writes to a region's input, which a region refuses.
    if (!style_.regions && random_.percent(style_.return_chance)) {
      compute(Kind::kReturn);
      return;
    }
    if (random_.percent(style_.data_chance)) {
      compute(Kind::kData);
      return;
    }
    if (style_.regions && random_.percent(15)) {
      compute(Kind::kRegion);
      return;
    }
    if (random_.percent(1)) {
      compute(Kind::kCrowd);
      return;
    }
    // Often, so that what is computed under the program's own hooks is saved under a guard of ebb's around them.
    if (style_.foreign_hooks && random_.percent(15)) {
      scope(random_.one_of(std::array{"foreign", "leave"}));
      return;
    }
    const std::size_t dice = random_.below(100);
    if (dice < style_.write_chance) {
      compute(Kind::kWrite);
    } else if (dice < 56) {
      compute(Kind::kCompute);
    } else if (dice < 74) {
      compute(Kind::kView);
    } else if (dice < 80) {
      compute(Kind::kIndex);
    } else if (dice < 90) {
      make(random_.one_of(std::array{"leaf", "leaf", "leaf", "constant", "shared"}));
    } else if (dice < 94) {
      const char* const other = style_.foreign_hooks ? "foreign" : "no_grad";
      scope(random_.one_of(std::array{"guard", "guard", "no_op", other, "leave", "leave", "leave", "leave"}));
    } else {
      backward(/*last=*/false);
    }
  }

  // What is still to be derived, usually.
  void end() {
    const std::size_t left = random_.below(5);
    if (random_.percent(40)) scope("leave");
    for (std::size_t i = 0; i < left; ++i) {
      backward(/*last=*/true);
    }
  }

  void make(const char* name) {
    Instruction line = new_line(operation(name));
    const bool foreign = random_.percent(style_.foreign_types);
    line.numbers = {static_cast<std::uint32_t>(random_.below(known_sizes().size())),
                    foreign ? static_cast<std::uint32_t>(random_.below(known_types().size())) : 0,
                    static_cast<std::uint32_t>(random_.below(1000))};
    const bool leaf = line.operation->name == "leaf";
    const int id = line.id;
    accept(std::move(line));
    // Something made of it that may move, for a parameter may not.
    if (leaf && random_.percent(75)) {
      Instruction scaled = new_line(operation("scale"));
      scaled.operands = {id};
      scaled.numbers[0] = 2;
      accept(std::move(scaled));
    }
  }

  void scope(const char* name) {
    Instruction line = new_line(operation(name));
    line.numbers[0] = static_cast<std::uint32_t>(random_.percent(80) ? 0 : 1 + random_.below(3));
    interpreter_.step(line);
    lines_.push_back(std::move(line));
  }

  // Tries until something can be computed.
  void compute(Kind kind) {
    for (int attempt = 0; attempt < 6; ++attempt) {
      Instruction line = new_line(random_.one_of(operations(kind)));
      for (std::size_t i = 0; i < line.operation->operands; ++i) {
        line.operands.push_back(wants_leaf(kind, i) ? pick_leaf() : pick(kind == Kind::kWrite && i == 0));
      }
      if (kind == Kind::kIndex && random_.percent(75)) {
        line.operands.back() = pick_index(line.operands.back());
      }
      std::ranges::generate(line.numbers, [&] { return static_cast<std::uint32_t>(random_.below(12)); });
      line.kept = random_.percent(kind == Kind::kReturn ? 50 : 15);
      if (accept(std::move(line))) return;
    }
  }

  bool wants_leaf(Kind kind, std::size_t operand) {
    return (kind == Kind::kReturn && operand == 0 && random_.percent(65)) ||
           (kind == Kind::kData && random_.percent(50));
  }

  void backward(bool last) {
    const bool gradients = random_.percent(40);
    Instruction line = new_line(operation(gradients ? "grad" : "backward"));
    const std::size_t roots = 1 + random_.below(3);
    for (std::size_t i = 0; i < roots; ++i) {
      line.operands.push_back(pick_root(last));
    }
    if (gradients) {
      const std::size_t inputs = 1 + random_.below(3);
      for (std::size_t i = 0; i < inputs; ++i) {
        line.inputs.push_back(random_.percent(50) ? pick_leaf() : pick(false));
      }
    }
    std::uint32_t flags = random_.percent(last ? 20 : 85) ? std::uint32_t{kRetain} : 0U;
    if (style_.derives_twice && random_.percent(gradients ? 60 : 15)) flags |= kCreate;
    // "A derivative through a region that is made on another thread"
    const bool here = style_.regions && (flags & kCreate) != 0;
    if (!here && random_.percent(15)) flags |= kElsewhere;
    if (!here && gradients && random_.percent(10)) flags |= kTwice;
    line.numbers = {flags, static_cast<std::uint32_t>(random_.below(1000)), 0};
    const std::size_t times = gradients && (flags & kCreate) != 0 && random_.percent(30) ? 3 : 1;
    for (std::size_t i = 0; i < times; ++i) {  // the same derivatives again, of one graph
      line.id = i == 0 ? line.id : next_id_++;
      const at::Tensor result = interpreter_.step(line);
      if (gradients && usable(result)) {
        values_.push_back({line.id, result});
      }
      lines_.push_back(line);
    }
    if (style_.writes_gradients && random_.percent(70)) {
      Instruction write = new_line(operation(random_.percent(75) ? "scale_gradients" : "zero_gradients"));
      interpreter_.step(write);
      lines_.push_back(std::move(write));
    }
  }

  Instruction new_line(const Operation& operation) {
    Instruction line;
    line.operation = &operation;
    line.id = next_id_++;
    return line;
  }

  bool accept(Instruction line) {
    const std::size_t records = interpreter_.records().size();
    at::Tensor result = interpreter_.step(line);
    if (interpreter_.records().size() > records || !usable(result)) {
      interpreter_.records().clear();
      return false;
    }
    for (Value& value : values_) {
      value.used = value.used || std::ranges::count(line.operands, value.id) > 0;
    }
    values_.push_back({line.id, std::move(result)});
    lines_.push_back(std::move(line));
    return true;
  }

  // A recent one, mostly: programs are long chains with some far links.
  int pick(bool to_write) {
    if (to_write && style_.legal_writes) {
      for (auto value = values_.rbegin(); value != values_.rend(); ++value) {
        if (!value->used && !value->tensor.is_leaf()) return value->id;
      }
    }
    if (random_.percent(30)) return random_.one_of(values_).id;
    return values_[values_.size() - 1 - random_.below(std::min<std::size_t>(values_.size(), 5))].id;
  }

  int pick_index(int otherwise) {
    for (auto value = values_.rbegin(); value != values_.rend(); ++value) {
      if (c10::isIntegralType(value->tensor.scalar_type(), /*includeBool=*/true)) return value->id;
    }
    return otherwise;
  }

  int pick_leaf() {
    for (int attempt = 0; attempt < 8; ++attempt) {
      const Value& value = random_.one_of(values_);
      if (value.tensor.is_leaf() && value.tensor.requires_grad()) return value.id;
    }
    return values_.front().id;
  }

  // Something with a graph behind it; in the end, what nobody has used.
  int pick_root(bool unused) {
    for (int attempt = 0; attempt < 12; ++attempt) {
      const Value& value = random_.one_of(values_);
      if (value.tensor.requires_grad() && !value.tensor.is_leaf() && !(unused && value.used && attempt < 8)) {
        return value.id;
      }
    }
    return pick(false);
  }

  Random& random_;
  const Style style_;
  const std::size_t length_;
  const Tensors shared_;
  Interpreter interpreter_;
  std::vector<Value> values_;
  Thread lines_;
  int next_id_ = 0;
};

Style random_style(Random& random) {
  Style style{};
  const std::size_t writes = random.below(100);
  style.write_chance = writes < 50 ? 0 : 8;
  style.legal_writes = writes < 80;
  style.foreign_types = random.percent(60) ? 0 : 30;
  style.derives_twice = random.percent(40);
  style.writes_gradients = random.percent(60);
  style.return_chance = random.percent(50) ? 8 : 0;
  style.data_chance = random.percent(20) ? 6 : 0;
  const bool is_written = style.write_chance > 0 || style.data_chance > 0;
  style.regions = !is_written && random.percent(40);
  style.foreign_hooks = !is_written && random.percent(30);
  return style;
}

// 5 to 200 lines, more often few than many.
std::size_t random_length(Random& random) {
  const std::size_t longest = random.one_of(std::array<std::size_t, 5>{20, 40, 40, 80, 200});
  return 5 + random.below(longest - 4);
}

// Autograd reads the address of a gradient that goes to a node on another stream, and a managed leaf that a custom
// function returns as a gradient then is an error (docs/correctness.md).
bool may_return_leaves_to_another_stream(const Program& program) {
  const auto has = [&](const auto& is_one) {
    return std::ranges::any_of(program.threads, [&](const Thread& lines) {
      return std::ranges::any_of(lines, [&](const Instruction& line) { return is_one(*line.operation); });
    });
  };
  return has([](const Operation& each) { return each.kind == Kind::kReturn; }) &&
         has([](const Operation& each) { return each.name.ends_with("_on_side"); });
}

}  // namespace

Case generate(std::uint64_t seed, std::uint64_t number, c10::Device device) {
  Random random(seed, number);
  Case made;
  made.setting = random_setting(random, device);
  const std::size_t threads = random.percent(75) ? 1 : 2 + random.below(3);
  const Style style = random_style(random);
  const std::size_t length = random_length(random);
  for (std::size_t i = 0; i < threads; ++i) {
    made.program.threads.push_back(ThreadWriter(random, style, std::max<std::size_t>(5, length / threads)).write());
  }
  if (device.is_cuda() && may_return_leaves_to_another_stream(made.program)) {
    made.setting.managed.reset();
  }
  return made;
}

}  // namespace ebb::graphs

#include "test/random/interpreter.h"

#include <algorithm>
#include <exception>
#include <iterator>
#include <ranges>
#include <stdexcept>
#include <thread>
#include <tuple>
#include <utility>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/autograd.h>

#include "offload/checkpoint.h"
#include "offload/parameters.h"

namespace ebb::graphs {
namespace {

at::Tensor values_of(at::IntArrayRef sizes, at::ScalarType type, std::uint64_t seed, c10::Device device) {
  const at::Generator random = at::detail::createCPUGenerator(seed);
  return at::randn(sizes, random, at::TensorOptions(type)).to(device);
}

// Whether a write to the tensor has no one result: on a GPU, where elements that share memory are written by several
// threads, each of which has read the memory before or after another's write.
bool is_raced_for(const at::Tensor& tensor) {
  if (!tensor.is_cuda() || tensor.numel() == 0) {
    return false;
  }
  std::int64_t last = 0;
  for (std::int64_t i = 0; i < tensor.dim(); ++i) {
    last += (tensor.size(i) - 1) * tensor.stride(i);
  }
  const at::Tensor places = at::arange(last + 1).as_strided(tensor.sizes(), tensor.strides());
  return std::get<0>(at::_unique(places)).numel() < tensor.numel();
}

std::vector<std::vector<int>> last_used_by(const Thread& lines) {
  std::map<int, std::size_t> last;
  for (std::size_t i = 0; i < lines.size(); ++i) {
    last[lines[i].id] = i;
    for (const std::vector<int>* used : {&lines[i].operands, &lines[i].inputs}) {
      for (const int id : *used) {
        if (last.contains(id)) {
          last[id] = i;
        }
      }
    }
  }
  std::vector<std::vector<int>> released(lines.size());
  for (const Instruction& line : lines) {
    if (!line.kept) {
      released[last[line.id]].push_back(line.id);
    }
  }
  return released;
}

std::vector<Record> run_thread(const Thread& lines, const Ground& ground, const Tensors& shared) {
  const auto released = last_used_by(lines);
  Interpreter interpreter(ground, shared);
  for (std::size_t i = 0; i < lines.size(); ++i) {
    interpreter.step(lines[i]);
    std::ranges::for_each(released[i], [&](int id) { interpreter.release(id); });
  }
  interpreter.finish();
  return std::move(interpreter.records());
}

}  // namespace

Tensors make_shared_tensors(c10::Device device) {
  return {values_of({4, 4}, at::kFloat, 1, device), values_of({8, 8}, at::kFloat, 2, device),
          values_of({64}, at::kBFloat16, 3, device), values_of({2, 3, 4}, at::kDouble, 4, device)};
}

Interpreter::Interpreter(Ground ground, const Tensors& shared) : ground_(std::move(ground)), shared_(shared) {
  const at::AutoGradMode grad_mode(true);
  broom_ = at::ones({}).requires_grad_().mul(2);
}

Interpreter::~Interpreter() {
  while (!scopes_.empty()) {
    scopes_.pop_back();
  }
}

at::Tensor Interpreter::step(const Instruction& line) {
  at::Tensor result;
  try {
    result = run(line);
  } catch (const c10::Error& error) {
    records_.emplace_back(line.id, std::string(error.what_without_backtrace()));
  } catch (const std::exception& error) {
    records_.emplace_back(line.id, std::string(error.what()));
  }
  if ((line.operation->kind == Kind::kBackward || line.operation->kind == Kind::kCrowd) && !result.defined()) {
    broom_.backward({}, /*retain_graph=*/true);
  }
  if (result.defined()) {
    values_[line.id] = result;
  }
  return result;
}

at::Tensor Interpreter::run(const Instruction& line) {
  switch (line.operation->kind) {
    case Kind::kMake:
      return make(line);
    case Kind::kScope:
      scope(line);
      return {};
    case Kind::kBackward:
      may_swap_data_ = may_swap_data_ && (line.numbers[0] & kCreate) == 0;
      if (line.operation->name == "grad") {
        gradients_.insert(line.id);
      }
      return backward(line);
    case Kind::kGradient:
      write_gradients(line);
      return {};
    default:
      break;
  }
  const Kind kind = line.operation->kind;
  const Tensors operands = values(line.operands);
  if (!may_run(line, operands)) {
    return {};
  }
  may_swap_data_ = may_swap_data_ && kind != Kind::kCrowd;
  if (kind == Kind::kData) {
    // Under hooks of any kind backward works on other tensors than the saved ones, over the same memory: a gradient
    // that is a saved leaf, and what a graph of gradients saves, do not see that the tensor gets other data.
    if (!may_swap_data_ || std::ranges::any_of(line.operands, [this](int id) { return gradients_.contains(id); })) {
      return {};
    }
    // Note [Memory that is resized]
    // A copy out under way reads memory that a program takes from its storage itself, behind whoever holds the storage.
    std::ranges::for_each(ground_.offloaders, &Offloader::drain);
    // Plain autograd has backward see what becomes of a saved tensor that only the graph still has. ebb does not, which
    // docs/correctness.md says.
    std::ranges::copy(operands, std::back_inserter(given_other_data_));
  }
  switch (kind) {
    case Kind::kCrowd:
      return crowd(line, operands.front());
    case Kind::kRegion:
      return run_region(line, operands);
    default:
      return line.operation->run(operands, line.numbers);
  }
}

// Whether the operands are there, and plain autograd or docs/correctness.md ("Not promised") says what comes out.
bool Interpreter::may_run(const Instruction& line, const Tensors& operands) const {
  if (operands.size() < line.operation->operands) {
    return false;
  }
  const auto shared = [this](const at::Tensor& operand) { return is_shared(operand); };
  switch (line.operation->kind) {
    case Kind::kReturn:
      // "saved under a guard, and once more outside of the guard by a custom function that returns the tensor"
      return is_guarded();
    case Kind::kData:
      return std::ranges::none_of(operands, shared);
    case Kind::kWrite:
      // "a gradient that is a saved tensor itself". Nothing tells such a gradient from one made with create_graph, so
      // no program writes to the latter either.
      return !shared(operands.front()) && !is_raced_for(operands.front()) &&
             !(operands.front().requires_grad() && gradients_.contains(first_known(line.operands)));
    default:
      return true;
  }
}

int Interpreter::first_known(const std::vector<int>& ids) const {
  return *std::ranges::find_if(ids, [this](int id) { return values_.contains(id); });
}

bool Interpreter::is_guarded() const {
  for (const Scope& scope : scopes_ | std::views::reverse) {
    if (scope.name != "no_grad") {
      return scope.name == "guard";
    }
  }
  return false;
}

// Regions of ebb's and of the program's own, alone and in one another. A region of ebb's runs again what is in it, and
// plain autograd does not: then the calls of hooks and functions are not compared.
at::Tensor Interpreter::run_region(const Instruction& line, const Tensors& operands) {
  constexpr std::uint32_t kWays = 3;
  const auto function = [run = line.operation->run, numbers = line.numbers](const Tensors& x) {
    return run(x, numbers);
  };
  const std::uint32_t inner = line.numbers[2] / kWays;
  constexpr std::uint32_t kEbbs = 0;
  constexpr std::uint32_t kByHooks = 1;
  // "An `ebb::checkpoint` inside of torch's, over which two backward passes run at once"
  may_run_twice_at_once_ = may_run_twice_at_once_ && !(line.numbers[2] % kWays == kByHooks && inner == kEbbs);
  are_calls_alike_ = are_calls_alike_ && line.numbers[2] % kWays != kEbbs && inner != kEbbs;
  return in_region(inner < kWays ? in_region(function, inner, line.id) : function, line.numbers[2] % kWays,
                   line.id)(operands);
}

RegionFunction Interpreter::in_region(RegionFunction function, std::uint32_t how, int id) const {
  if (how == 0) {  // ebb's
    return [function = std::move(function), plain = ground_.offloaders.empty(), id](const Tensors& inputs) {
      const auto inside = [function](const Tensors& x) {
        const ForeignScope innermost(nullptr);
        return Tensors{function(x)};
      };
      const ForeignScope innermost(nullptr);  // which would have the region's inputs, and plain autograd has none
      constexpr int kWaysOfEbb = 3;
      constexpr int kAllowed = 2;  // and not asked for
      if (plain || id % kWaysOfEbb == kAllowed) {
        return (plain ? inside(inputs) : recomputable(inside, inputs)).front();
      }
      return checkpoint(inside, inputs, id % kWaysOfEbb == 0 ? EarlyStop::kYes : EarlyStop::kNo).front();
    };
  }
  const auto by = how == 1 ? &checkpoint_by_hooks : &checkpoint_by_reentry;
  return [function = std::move(function), by, calls = calls_](const Tensors& inputs) {
    return by(function, inputs, calls);
  };
}

// Graphs of `x` that have gone backward, every other one to go backward again, and between them some that never do.
at::Tensor Interpreter::crowd(const Instruction& line, const at::Tensor& x) {
  const std::size_t graphs = 12 + line.numbers[0] % 24;
  at::Tensor sum;
  for (std::size_t i = 0; i < graphs; ++i) {
    const at::Tensor out = at::silu(x * (0.1 * static_cast<double>(i % 7))) * x.sin();
    const bool retain = i % 2 == 0;
    const Tensors slopes = torch::autograd::grad({out}, {x}, {at::ones_like(out)}, retain);
    sum = sum.defined() ? sum + slopes[0] : slopes[0];
    crowd_.push_back(out);
    at::silu(x.cos()).exp();
  }
  return sum;
}

// As clipping, averaging and zeroing do. Nothing but the gradients may change, unless it does with plain autograd.
void Interpreter::write_gradients(const Instruction& line) {
  const at::NoGradGuard no_grad;
  const bool zero = line.operation->name == "zero_gradients";
  for (auto& [id, leaf] : leaves_) {
    if (at::Tensor& gradient = leaf.mutable_grad(); gradient.defined()) {
      gradient.mul_(zero ? 0 : 0.5);
    }
  }
  const std::string seen = " seen by " + std::to_string(line.id) + ",";
  for (const auto& [id, value] : values_) {
    records_.emplace_back(id, "value" + seen, value);
  }
  for (const auto& [id, leaf] : leaves_) {
    records_.emplace_back(id, "leaf" + seen, leaf);
    records_.emplace_back(id, "gradient" + seen, leaf.grad());
  }
}

at::Tensor Interpreter::make(const Instruction& line) {
  const auto& [sizes, type, seed] = line.numbers;
  if (line.operation->name == "shared") {
    return shared_[sizes % shared_.size()];
  }
  at::Tensor made = values_of(known_sizes()[sizes % known_sizes().size()], known_types()[type % known_types().size()],
                              seed, ground_.device);
  if (line.operation->name == "leaf") {
    made.requires_grad_();
    leaves_.emplace_back(line.id, made);
    manage(made);
  }
  return made;
}

void Interpreter::manage(const at::Tensor& leaf) {
  if (ground_.offloaders.empty() || !ground_.managed) {
    return;
  }
  Parameters how;
  how.minimum_bytes = 0;
  if (!ground_.managed->by_plan) {
    how.device_bytes = ground_.managed->device_bytes;
  }
  try {
    ground_.offloaders.front()->manage({leaf}, how);
  } catch (const std::invalid_argument&) {  // there is no such budget: the leaf stays what it is
  } catch (const c10::Error&) {             // no room
  }
}

void Interpreter::scope(const Instruction& line) {
  const bool plain = ground_.offloaders.empty();
  if (line.operation->name == "leave") {
    if (!scopes_.empty()) {
      scopes_.pop_back();
    }
  } else if (line.operation->name == "no_grad") {
    scopes_.push_back({line.operation->name, std::make_unique<at::NoGradGuard>()});
  } else if (line.operation->name == "foreign") {
    Foreign foreign{foreign_hooks(line.numbers[0], calls_), nullptr};
    foreign.scope = std::make_unique<ForeignScope>(foreign.hooks.get());
    scopes_.push_back({line.operation->name, std::move(foreign)});
  } else {
    Scope& scope = scopes_.emplace_back(Scope{line.operation->name, {}, std::make_unique<ForeignScope>(nullptr)});
    if (plain) {
      return;
    }
    if (line.operation->name == "no_op") {
      scope.held = std::make_unique<NoOpGuard>();
    } else {
      scope.held = std::make_unique<OffloadGuard>(*ground_.offloaders[line.numbers[0] % ground_.offloaders.size()]);
    }
  }
}

Tensors Interpreter::values(const std::vector<int>& ids) const {
  Tensors found;
  for (const int id : ids) {
    if (const auto known = values_.find(id); known != values_.end()) {
      found.push_back(known->second);
    }
  }
  return found;
}

bool Interpreter::is_shared(const at::Tensor& tensor) const {
  return std::ranges::any_of(shared_, [&](const at::Tensor& each) { return share_a_storage(each, tensor); });
}

void Interpreter::release(int id) {
  if (const auto known = values_.find(id); known != values_.end()) {
    records_.emplace_back(id, "value", known->second);
    values_.erase(known);
  }
}

void Interpreter::finish() {
  while (!scopes_.empty()) {
    scopes_.pop_back();
  }
  while (!values_.empty()) {
    release(values_.begin()->first);
  }
  crowd_.clear();
  if (are_calls_alike_) {
    records_.emplace_back(
        0, "calls of hooks and regions",
        at::tensor({static_cast<std::int64_t>(calls_->packs), static_cast<std::int64_t>(calls_->unpacks),
                    static_cast<std::int64_t>(calls_->runs)}));
  }
  for (auto& [id, leaf] : leaves_) {
    records_.emplace_back(id, "leaf", leaf);
    records_.emplace_back(id, "gradient", leaf.grad());
    leaf.mutable_grad().reset();  // one that was made with create_graph holds the graph, and the graph the leaf
  }
  leaves_.clear();
}

Outcome run(const Program& program, const Ground& ground) {
  const Tensors shared = make_shared_tensors(ground.device);
  Outcome outcome(program.threads.size());
  if (program.threads.size() == 1) {
    outcome[0] = run_thread(program.threads[0], ground, shared);
  } else {
    std::vector<std::jthread> threads;
    for (std::size_t i = 0; i < program.threads.size(); ++i) {
      threads.emplace_back([&, i] { outcome[i] = run_thread(program.threads[i], ground, shared); });
    }
  }
  for (std::vector<Record>& records : outcome) {
    std::ranges::for_each(records, &Record::settle);
  }
  return outcome;
}

}  // namespace ebb::graphs

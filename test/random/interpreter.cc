#include "test/random/interpreter.h"

#include <algorithm>
#include <exception>
#include <ranges>
#include <thread>
#include <utility>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <c10/util/Exception.h>

namespace ebb::graphs {
namespace {

at::Tensor values_of(at::IntArrayRef sizes, at::ScalarType type, std::uint64_t seed, c10::Device device) {
  const at::Generator random = at::detail::createCPUGenerator(seed);
  return at::randn(sizes, random, at::TensorOptions(type)).to(device);
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
  if (line.operation->kind == Kind::kBackward && !result.defined()) {
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
      return backward(line);
    default:
      break;
  }
  const Tensors operands = values(line.operands);
  if (operands.size() < line.operation->operands ||
      (line.operation->kind == Kind::kWrite && is_shared(operands.front()))) {
    return {};
  }
  return line.operation->run(operands, line.numbers);
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
  }
  return made;
}

void Interpreter::scope(const Instruction& line) {
  const bool plain = ground_.offloaders.empty();
  if (line.operation->name == "leave") {
    if (!scopes_.empty()) {
      scopes_.pop_back();
    }
  } else if (line.operation->name == "no_grad") {
    scopes_.emplace_back(std::make_unique<at::NoGradGuard>());
  } else if (plain) {
    scopes_.emplace_back();
  } else if (line.operation->name == "no_op") {
    scopes_.emplace_back(std::make_unique<NoOpGuard>());
  } else {
    Offloader& offloader = *ground_.offloaders[line.numbers[0] % ground_.offloaders.size()];
    scopes_.emplace_back(std::make_unique<OffloadGuard>(offloader));
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
  return std::ranges::any_of(shared_, [&](const at::Tensor& each) { return each.is_alias_of(tensor); });
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
  for (auto& [id, leaf] : leaves_) {
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

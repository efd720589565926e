#include "test/random/proof.h"

#include <algorithm>
#include <exception>
#include <memory>
#include <optional>
#include <regex>
#include <set>
#include <string>
#include <unordered_set>
#include <vector>

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>

#include "test/random/interpreter.h"

namespace ebb::graphs {
namespace {

using torch::autograd::Node;

// All nodes that gradients of the roots could come to. They live as long as the roots.
std::vector<Node*> nodes_behind(const Tensors& roots) {
  std::vector<Node*> found;
  std::unordered_set<Node*> known;
  const auto add = [&](Node* node) {
    if (node != nullptr && known.insert(node).second) {
      found.push_back(node);
    }
  };
  for (const at::Tensor& root : roots) {
    add(root.grad_fn().get());
  }
  for (std::size_t i = 0; i < found.size(); ++i) {
    for (const torch::autograd::Edge& edge : found[i]->next_edges()) {
      add(edge.function.get());
    }
  }
  return found;
}

// Of what is not differentiable: undefined.
Tensors gradients_for(const Node& node) {
  Tensors gradients;
  for (std::uint32_t i = 0; i < node.num_inputs(); ++i) {
    const torch::autograd::InputMetadata& metadata = node.input_metadata(i);
    gradients.push_back(metadata.was_default_constructed() ? at::Tensor() : metadata.zeros_like().fill_(1));
  }
  return gradients;
}

bool has_saves(Node& node) { return dynamic_cast<torch::autograd::AccumulateGrad*>(&node) == nullptr; }

// What the node says when it is run by itself.
std::string error_of(Node& node) {
  try {
    node(gradients_for(node));
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  } catch (const std::exception& error) {
    return error.what();
  }
  return {};
}

// The versions that the error of a write tells; nullopt for another error.
std::optional<std::string> versions_in(const std::string& error) {
  static const std::regex versions("is at version [0-9]+; expected version [0-9]+");
  std::smatch found;
  return std::regex_search(error, found, versions) ? std::optional(found.str()) : std::nullopt;
}

// `same_versions`: an error that tells the same versions will do, whichever tensor it names.
bool refuses_with(const Tensors& roots, const std::string& refusal, bool same_versions) {
  const auto refused = same_versions ? versions_in(refusal) : std::nullopt;
  for (Node* node : nodes_behind(roots)) {
    if (!has_saves(*node)) {
      continue;
    }
    const std::string error = error_of(*node);
    if (same_error(error, refusal) || (refused && versions_in(error) == refused)) {
      return true;
    }
  }
  return false;
}

std::set<int> failed_lines(const std::vector<Record>& records) {
  std::set<int> failed;
  for (const Record& record : records) {
    if (record.is_error()) {
      failed.insert(record.value());
    }
  }
  return failed;
}

// Runs the lines before `refusal` with all graphs retained, and then looks(interpreter, the refused line).
template <typename Before, typename Look>
bool look_at(const Program& program, const Outcome& expected, const Difference& refusal, c10::Device device,
             const Before& before, const Look& look) {
  const Tensors shared = make_shared_tensors(device);
  Interpreter interpreter(Ground{device, {}, {}}, shared);
  const std::set<int> failed = failed_lines(expected[refusal.thread]);
  bool proven = false;
  for (Instruction line : program.threads[refusal.thread]) {
    if (line.id == refusal.value) {
      proven = look(interpreter.values(line.operands), line);
      break;
    }
    if (failed.contains(line.id)) {
      continue;  // or it would succeed here, and the lines that use it would run
    }
    if (line.operation->kind == Kind::kBackward) {
      line.numbers[0] |= kRetain;
    }
    before(interpreter, line);
    interpreter.step(line);
  }
  interpreter.finish();
  return proven;
}

// What the node makes of ones; nothing if it throws.
Tensors made_by(Node& node) {
  try {
    Tensors made;
    for (const at::Tensor& each : node(gradients_for(node))) {
      made.push_back(each.defined() ? each.detach().clone() : each);
    }
    return made;
  } catch (const std::exception&) {
    return {};
  }
}

bool same(const Tensors& a, const Tensors& b) {
  return std::ranges::equal(a, b, [](const at::Tensor& x, const at::Tensor& y) {
    return x.defined() == y.defined() && (!x.defined() || x.equal(y));
  });
}

// Each sign and each size of what is there changes in one of the tries: some nodes look at nothing else.
bool changes_with(Node& node, const at::Tensor& memory) {
  const at::NoGradGuard no_grad;
  const Tensors before = made_by(node);
  // With a version counter of its own, and each element of an expanded tensor once: LibTorch writes to no other.
  at::Tensor written = memory.variable_data();
  for (std::int64_t i = 0; i < written.dim(); ++i) {
    if (written.stride(i) == 0) {
      written = written.narrow(i, 0, std::min<std::int64_t>(1, written.size(i)));
    }
  }
  const at::Tensor content = written.clone();
  const auto changes_by = [&](double factor, double more) {
    if (c10::isIntegralType(written.scalar_type(), /*includeBool=*/true)) {
      written.bitwise_not_();
    } else {
      written.mul_(factor).add_(more);
    }
    const Tensors after = made_by(node);
    written.copy_(content);
    return !same(before, after);
  };
  return changes_by(-0.75, 0.375) || changes_by(-1, 0);
}

}  // namespace

bool plain_refuses_too(const Program& program, const Outcome& expected, const Difference& refusal, c10::Device device) {
  Tensors others;  // a recipe may begin from a save that other parts of the graph have
  std::vector<int> ids;
  return look_at(
      program, expected, refusal, device,
      [&](const Interpreter& interpreter, const Instruction& line) {
        others = interpreter.values(ids);
        ids.push_back(line.id);
      },
      [&](const Tensors& roots, const Instruction&) {
        return refuses_with(roots, refusal.error, /*same_versions=*/true) ||
               refuses_with(others, refusal.error, /*same_versions=*/false);
      });
}

bool saved_memory_was_taken(const Program& program, const Outcome& expected, const Difference& refusal,
                            c10::Device device) {
  const std::vector<Instruction>& lines = program.threads[refusal.thread];
  const auto refused = std::ranges::find(lines, refusal.value, &Instruction::id);
  const auto changes_a_node = [](const Tensors& roots, const Tensors& memory) {
    return std::ranges::any_of(nodes_behind(roots), [&](Node* node) {
      return has_saves(*node) &&
             std::ranges::any_of(memory, [&](const at::Tensor& each) { return changes_with(*node, each); });
    });
  };
  Tensors taken;
  bool was_of_a_node = false;  // a leaf's node has the leaf's new data afterwards
  return look_at(
      program, expected, refusal, device,
      [&](const Interpreter& interpreter, const Instruction& line) {
        if (line.operation->kind == Kind::kData) {
          Tensors before;
          for (const at::Tensor& operand : interpreter.values(line.operands)) {
            before.push_back(operand.variable_data());
          }
          was_of_a_node = was_of_a_node || changes_a_node(interpreter.values(refused->operands), before);
          taken.insert(taken.end(), before.begin(), before.end());
        }
      },
      [&](const Tensors& roots, const Instruction& line) {
        if (line.operation->name == "derive_while_empty") {
          return true;  // it takes what the recipe needs itself
        }
        return was_of_a_node || changes_a_node(roots, taken);
      });
}

}  // namespace ebb::graphs

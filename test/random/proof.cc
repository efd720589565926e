#include "test/random/proof.h"

#include <exception>
#include <memory>
#include <set>
#include <unordered_set>
#include <vector>

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

// What the node says when it is run by itself; undefined gradients come to what is not differentiable.
std::string error_of(Node& node) {
  Tensors gradients;
  for (std::uint32_t i = 0; i < node.num_inputs(); ++i) {
    const torch::autograd::InputMetadata& metadata = node.input_metadata(i);
    gradients.push_back(metadata.was_default_constructed() ? at::Tensor() : metadata.zeros_like());
  }
  try {
    node(std::move(gradients));
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  } catch (const std::exception& error) {
    return error.what();
  }
  return {};
}

bool refuses_with(const Tensors& roots, const std::string& refusal) {
  for (Node* node : nodes_behind(roots)) {
    const bool has_no_saves = dynamic_cast<torch::autograd::AccumulateGrad*>(node) != nullptr;
    if (!has_no_saves && same_error(error_of(*node), refusal)) {
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

}  // namespace

bool plain_refuses_too(const Program& program, const Outcome& expected, const Difference& refusal, c10::Device device) {
  const Tensors shared = make_shared_tensors(device);
  Interpreter interpreter(Ground{device, {}}, shared);
  const std::set<int> failed = failed_lines(expected[refusal.thread]);
  bool proven = false;
  for (Instruction line : program.threads[refusal.thread]) {
    if (line.id == refusal.value) {
      proven = refuses_with(interpreter.values(line.operands), refusal.error);
      break;
    }
    if (failed.contains(line.id)) {
      continue;  // or it would succeed here, and the lines that use it would run
    }
    if (line.operation->kind == Kind::kBackward) {
      line.numbers[0] |= kRetain;
    }
    interpreter.step(line);
  }
  interpreter.finish();
  return proven;
}

}  // namespace ebb::graphs

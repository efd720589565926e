#pragma once

#include <exception>
#include <memory>
#include <utility>
#include <vector>

#include <torch/csrc/autograd/anomaly_mode.h>
#include <torch/csrc/autograd/engine.h>

#include "offload/base/libtorch.h"

namespace ebb {

// An engine that leaves everything to another engine; a subclass answers some of the calls itself. The subclass is to
// be leaked, because autograd may run at any time, also at exit.
class ForwardingEngine : public torch::autograd::Engine {
 public:
  // `next`: lives for ever, as every default engine does.
  explicit ForwardingEngine(Engine& next) : next_(next) {}

  std::unique_ptr<torch::autograd::SavedVariableHooks> get_default_saved_variable_hooks() override {
    return next_.get_default_saved_variable_hooks();
  }

  torch::autograd::variable_list execute(const torch::autograd::edge_list& roots,
                                         const torch::autograd::variable_list& inputs, bool keep_graph,
                                         bool create_graph, bool accumulate_grad,
                                         const torch::autograd::edge_list& outputs) override {
    return next_.execute(roots, inputs, keep_graph, create_graph, accumulate_grad, outputs);
  }

  c10::intrusive_ptr<at::ivalue::Future> execute_with_graph_task(
      const std::shared_ptr<torch::autograd::GraphTask>& graph_task, NodePtr graph_root,
      torch::autograd::InputBuffer&& input_buffer) override {
    return next_.execute_with_graph_task(graph_task, std::move(graph_root), std::move(input_buffer));
  }

#ifdef EBB_HAS_NODE_CREATION_HOOKS
  std::vector<std::unique_ptr<torch::autograd::NodeCreationHook>> get_node_creation_hooks() override {
    return next_.get_node_creation_hooks();
  }
#endif

  std::unique_ptr<torch::autograd::AnomalyMetadata> make_anomaly_metadata() override {
    return next_.make_anomaly_metadata();
  }

  void thread_on_exception(const std::shared_ptr<torch::autograd::GraphTask>& graph_task, const NodePtr& node,
                           std::exception& error) override {
    next_.thread_on_exception(graph_task, node, error);
  }

  void thread_init(int device, const std::shared_ptr<torch::autograd::ReadyQueue>& queue,
                   bool should_increment) override {
    next_.thread_init(device, queue, should_increment);
  }

 private:
  Engine& next_;
};

}  // namespace ebb

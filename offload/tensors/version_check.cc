#include "offload/tensors/version_check.h"

#include <sstream>

#include <ATen/core/Formatting.h>
#include <torch/csrc/autograd/anomaly_mode.h>

namespace ebb {

// The text is that of torch/csrc/autograd/saved_variable.cpp, so that users, and tests, find what they know.
void VersionCheck::check(const at::Tensor& like) const {
  if (holds()) {
    return;
  }
  std::ostringstream message;
  message << "one of the variables needed for gradient computation has been modified by an inplace operation: ["
          << like.toString() << " ";
  if (like.is_nested()) {
    message << like._nested_tensor_size();
  } else {
    message << like.sizes();
  }
  message << "]";
  if (const auto grad_fn = producer()) {
    message << ", which is output " << output_nr_ << " of " << name_in_errors(*grad_fn) << ",";
  }
  message << " is at version " << counter_.current_version() << "; expected version " << saved_version_ << " instead.";
  if (torch::autograd::AnomalyMode::is_enabled()) {
    message << " Hint: the backtrace further above shows the operation that failed to compute its gradient. The "
               "variable in question was changed in there or anywhere later. Good luck!";
  } else {
    message << " Hint: enable anomaly detection to find the operation that failed to compute its gradient, with "
               "torch.autograd.set_detect_anomaly(True, check_nan=False).";
  }
  TORCH_CHECK(false, message.str());
}

// The node that LibTorch's error names: the node that made what the tensor holds now. If the saving node saved its own
// output, LibTorch names the saving node, which is the node that runs while its saves are unpacked.
NodePtr VersionCheck::producer() const {
  NodePtr at_save = grad_fn_.lock();
  if (at_save != nullptr && at_save == torch::autograd::get_current_node()) {
    return at_save;
  }
  const at::Tensor tensor = saved();
  return tensor.defined() ? tensor.grad_fn() : at_save;
}

}  // namespace ebb

#include "examples/train/checkpoint.h"

#include <array>
#include <charconv>
#include <cstring>
#include <map>
#include <memory>
#include <span>
#include <stdexcept>
#include <system_error>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>
#include <c10/util/accumulate.h>
#include <torch/optim/adamw.h>
#include <torch/utils.h>

#include "examples/llama/llama.h"
#include "examples/train/mapped_file.h"
#include "examples/train/tensor_file.h"

namespace ebb {
namespace {

constexpr const char* kStepsDone = "steps_done";
constexpr const char* kDtype = "dtype";

// The sizes that make one model's checkpoint unusable for another.
std::array<std::pair<const char*, std::int64_t>, 6> sizes(const LlamaConfig& config) {
  return {{{"vocab", config.vocab},
           {"dim", config.dim},
           {"layers", config.layers},
           {"heads", config.heads},
           {"kv-heads", config.kv_heads},
           {"ffn", config.ffn}}};
}

[[noreturn]] void fail(const std::filesystem::path& file, const std::string& why) {
  throw std::runtime_error("cannot resume from " + file.string() + ": " + why);
}

// The format's name of a type that a model's tensors may have.
std::string dtype_name(c10::ScalarType type) {
  TORCH_CHECK(type == c10::kFloat || type == c10::kBFloat16, "a checkpoint holds no ", c10::toString(type));
  return type == c10::kFloat ? "F32" : "BF16";
}

// The tensors of one model and its optimizer by their names in a file. Moments that are not there yet are made, of
// zeros, as AdamW would.
std::vector<std::pair<std::string, at::Tensor>> named_tensors(const Llama& model, torch::optim::AdamW& optimizer) {
  std::vector<std::pair<std::string, at::Tensor>> named;
  for (const auto& parameter : model.named_parameters()) {
    const at::Tensor& weights = parameter.value();
    auto& state = optimizer.state()[weights.unsafeGetTensorImpl()];
    if (state == nullptr) {
      auto fresh = std::make_unique<torch::optim::AdamWParamState>();
      fresh->exp_avg(at::zeros_like(weights));
      fresh->exp_avg_sq(at::zeros_like(weights));
      state = std::move(fresh);
    }
    const auto& moments = static_cast<const torch::optim::AdamWParamState&>(*state);
    named.emplace_back("model." + parameter.key(), weights);
    named.emplace_back("exp_avg." + parameter.key(), moments.exp_avg());
    named.emplace_back("exp_avg_sq." + parameter.key(), moments.exp_avg_sq());
  }
  return named;
}

std::span<const std::byte> bytes_of(const at::Tensor& contiguous_on_cpu) {
  return {static_cast<const std::byte*>(contiguous_on_cpu.const_data_ptr()), contiguous_on_cpu.nbytes()};
}

TensorFile parse(const MappedFile& mapped, const std::filesystem::path& file) {
  try {
    return parse_tensor_file(mapped.bytes());
  } catch (const BadTensorFile& error) {
    fail(file, std::string("it is not a checkpoint, or it is damaged: ") + error.what());
  }
}

const std::string& read_text(const TensorFile& in, const std::string& name, const std::filesystem::path& file) {
  const auto found = in.texts.find(name);
  if (found == in.texts.end()) {
    fail(file, "it is not a checkpoint of this program: it has no " + name);
  }
  return found->second;
}

void require_same(const TensorFile& in, const std::filesystem::path& file, const std::string& name,
                  const std::string& asked) {
  const std::string& in_file = read_text(in, name, file);
  if (in_file != asked) {
    fail(file, "it was saved with " + name + " " + in_file + ", and this run has " + name + " " + asked);
  }
}

std::int64_t read_steps(const TensorFile& in, const std::filesystem::path& file) {
  const std::string& text = read_text(in, kStepsDone, file);
  std::int64_t steps = 0;
  const auto [rest, error] = std::from_chars(text.data(), text.data() + text.size(), steps);
  if (error != std::errc() || rest != text.data() + text.size() || steps < 0) {
    fail(file, "its " + std::string(kStepsDone) + " is no number of steps");
  }
  return steps;
}

void read_tensor(const TensorFile& in, const std::string& name, const at::Tensor& to,
                 const std::filesystem::path& file) {
  const auto found = in.tensors.find(name);
  if (found == in.tensors.end()) {
    fail(file, "it is not a checkpoint of this program: it has no " + name);
  }
  const TensorBytes& from = found->second;
  if (from.dtype != dtype_name(to.scalar_type()) || at::IntArrayRef(from.shape) != to.sizes()) {
    fail(file, "its " + name + " has another type or other sizes than the model's");
  }
  const at::Tensor staged = at::empty(to.sizes(), to.options().device(c10::kCPU).requires_grad(false));
  std::memcpy(staged.mutable_data_ptr(), from.bytes.data(), from.bytes.size());
  to.copy_(staged);
}

}  // namespace

void save_checkpoint(const std::filesystem::path& file, const Llama& model, torch::optim::AdamW& optimizer,
                     const std::string& dtype, std::int64_t steps_done) {
  const torch::NoGradGuard no_grad;
  std::map<std::string, std::string> texts{{kDtype, dtype}, {kStepsDone, std::to_string(steps_done)}};
  for (const auto& [name, value] : sizes(model.config())) {
    texts[name] = std::to_string(value);
  }
  // Parameters only: the rope tables are buffers, which follow from the sizes and bind a run to its sequence length.
  const auto tensors = named_tensors(model, optimizer);
  std::vector<TensorSpec> specs;
  specs.reserve(tensors.size());
  for (const auto& [name, tensor] : tensors) {
    specs.push_back({name, dtype_name(tensor.scalar_type()), tensor.sizes().vec()});
  }
  TensorFileWriter out(file, texts, specs);
  for (const auto& [name, tensor] : tensors) {
    out.append(bytes_of(tensor.to(tensor.options().device(c10::kCPU), /*non_blocking=*/false, /*copy=*/true)));
  }
  out.commit();
}

std::int64_t load_checkpoint(const std::filesystem::path& file, Llama& model, torch::optim::AdamW& optimizer,
                             const std::string& dtype) {
  const torch::NoGradGuard no_grad;
  try {
    const MappedFile mapped(file);
    const TensorFile in = parse(mapped, file);
    for (const auto& [name, asked] : sizes(model.config())) {
      require_same(in, file, name, std::to_string(asked));
    }
    require_same(in, file, kDtype, dtype);
    const std::int64_t steps_done = read_steps(in, file);
    for (const auto& [name, tensor] : named_tensors(model, optimizer)) {
      read_tensor(in, name, tensor, file);
    }
    for (auto& [parameter, state] : optimizer.state()) {
      static_cast<torch::optim::AdamWParamState&>(*state).step(steps_done);  // AdamW has taken every one
    }
    return steps_done;
  } catch (const std::system_error& error) {
    fail(file, error.code().message());
  }
}

}  // namespace ebb

#include "bench/train/checkpoint.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <stdexcept>
#include <utility>

#include <ATen/core/ivalue.h>
#include <c10/util/Exception.h>
#include <torch/optim/optimizer.h>
#include <torch/serialize/input-archive.h>
#include <torch/serialize/output-archive.h>

#include "bench/llama.h"
#include "bench/whole_file.h"

namespace ebb {
namespace {

using torch::serialize::InputArchive;
using torch::serialize::OutputArchive;

constexpr const char* kDamaged = "it is not a checkpoint, or it is damaged";

// The sizes that make one model's checkpoint unusable for another. An archive takes no hyphen in a name.
std::array<std::pair<const char*, std::int64_t>, 6> sizes(const LlamaConfig& config) {
  return {{{"vocab", config.vocab},
           {"dim", config.dim},
           {"layers", config.layers},
           {"heads", config.heads},
           {"kv_heads", config.kv_heads},
           {"ffn", config.ffn}}};
}

[[noreturn]] void fail(const std::filesystem::path& file, const std::string& why) {
  throw std::runtime_error("cannot resume from " + file.string() + ": " + why);
}

// A parameter's name as an archive takes it, which is without dots.
std::string key_of(std::string name) {
  std::replace(name.begin(), name.end(), '.', '_');
  return name;
}

InputArchive open_archive(const std::filesystem::path& file, c10::Device device) {
  if (!std::ifstream(file, std::ios::binary)) {
    fail(file, std::strerror(errno));
  }
  InputArchive archive;
  try {
    archive.load_from(file.string(), device);
  } catch (const std::exception&) {
    fail(file, kDamaged);
  }
  return archive;
}

c10::IValue read_value(InputArchive& archive, const std::string& key, const std::filesystem::path& file) {
  c10::IValue value;
  if (!archive.try_read(key, value)) {
    fail(file, "it is not a checkpoint of this program: it has no " + key);
  }
  return value;
}

InputArchive read_part(InputArchive& archive, const std::string& key, const std::filesystem::path& file) {
  InputArchive part;
  if (!archive.try_read(key, part)) {
    fail(file, "it is not a checkpoint of this program: it has no " + key);
  }
  return part;
}

template <typename Value>
void require_same(const std::filesystem::path& file, const std::string& name, const Value& in_file,
                  const Value& asked) {
  if (in_file != asked) {
    fail(file,
         "it was saved with " + name + " " + c10::str(in_file) + ", and this run has " + name + " " + c10::str(asked));
  }
}

}  // namespace

void save_checkpoint(const std::filesystem::path& file, const Llama& model, const torch::optim::Optimizer& optimizer,
                     const std::string& dtype, std::int64_t steps_done) {
  OutputArchive archive;
  for (const auto& [name, value] : sizes(model.config())) {
    archive.write(name, c10::IValue(value));
  }
  archive.write("dtype", c10::IValue(dtype));
  archive.write("steps_done", c10::IValue(steps_done));
  // Not Module::save: the rope tables are buffers, which follow from the sizes and bind a run to its sequence length.
  OutputArchive weights(archive.compilation_unit());
  for (const auto& parameter : model.named_parameters()) {
    weights.write(key_of(parameter.key()), parameter.value());
  }
  archive.write("model", weights);
  OutputArchive moments(archive.compilation_unit());
  optimizer.save(moments);
  archive.write("optimizer", moments);

  WholeFile out(file);
  archive.save_to([&out](const void* data, std::size_t bytes) {
    out.append(data, bytes);
    return bytes;
  });
  out.commit();
}

std::int64_t load_checkpoint(const std::filesystem::path& file, Llama& model, torch::optim::Optimizer& optimizer,
                             const std::string& dtype, c10::Device device) {
  auto archive = open_archive(file, device);
  for (const auto& [name, asked] : sizes(model.config())) {
    require_same(file, name, read_value(archive, name, file).toInt(), asked);
  }
  require_same(file, "dtype", read_value(archive, "dtype", file).toStringRef(), dtype);
  auto weights = read_part(archive, "model", file);
  auto moments = read_part(archive, "optimizer", file);
  try {
    for (auto& parameter : model.named_parameters()) {
      weights.read(key_of(parameter.key()), parameter.value());
    }
    optimizer.load(moments);
  } catch (const c10::OutOfMemoryError&) {
    throw;
  } catch (const c10::Error&) {
    fail(file, kDamaged);
  }
  return read_value(archive, "steps_done", file).toInt();
}

}  // namespace ebb

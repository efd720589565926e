#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>

#include <ATen/core/Tensor.h>

namespace ebb {

// How Offloader::manage keeps parameters.
struct Parameters {
  // The most bytes of managed storages that are on the device at once, with what is being prefetched and what is being
  // copied home. An operation whose own storages take more gets them all the same, and a gradient or state that has
  // just been made is there besides until others have left. nullopt: the plan for Options::device_budget decides, which
  // has to be in bytes or a share of free memory; before there is a plan, a quarter of the budget or less.
  std::optional<std::uint64_t> device_bytes = std::nullopt;

  // So many bytes of managed storages stay on the device for good, beside `device_bytes`, and have no home: parameters
  // in the order in which manage() gets them, then optimizer states in the order in which they are made, each that
  // still finds room. Gradients are not among them.
  std::uint64_t resident_bytes = 0;

  // How far ahead of its use a storage is fetched, in bytes of storages; nullopt: half of the bound, and
  // at most 2 GB.
  std::optional<std::uint64_t> prefetch_bytes = std::nullopt;

  // Smaller storages stay on the device: biases and the scales of norms take little, and kernels that read their memory
  // without an operation find the memory.
  std::uint64_t minimum_bytes = 1 << 20;

  // Which parameters of a module are managed, by their full name and the tensor; null: all.
  std::function<bool(const std::string& name, const at::Tensor& parameter)> which = nullptr;

  // What goes home.
  bool weights = true;    // the parameters themselves
  bool gradients = true;  // each gradient when backward has accumulated the next one
  bool states = true;     // of ebb's optimizers, and what is made in an OptimizerStep; as the first call says
};

}  // namespace ebb

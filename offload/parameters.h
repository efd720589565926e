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
  // copied home. An operation whose own storages take more gets them all the same. A gradient or state that has just
  // been made is there besides until others have left. nullopt: the plan for Options::device_budget decides, and that
  // budget has to be in bytes or a share of free memory. Before there is a plan, a quarter of the budget or less.
  std::optional<std::uint64_t> device_bytes = std::nullopt;

  // So many bytes of managed storages stay on the device for good, beside `device_bytes`, and have no home. Parameters
  // are taken in the order in which manage() gets them, then optimizer states in the order in which they are made. A
  // storage for which too little is left of the bytes is passed over. Gradients are not taken.
  std::uint64_t resident_bytes = 0;

  // How far ahead of its use a storage is fetched, in bytes of storages; nullopt: half of the bound, and
  // at most 2 GB.
  std::optional<std::uint64_t> prefetch_bytes = std::nullopt;

  // Smaller storages stay on the device. Biases and the scales of norms take little, and some kernels read their memory
  // without an operation.
  std::uint64_t minimum_bytes = 1 << 20;

  // Which parameters of a module are managed, by their full name and the tensor; null: all.
  std::function<bool(const std::string& name, const at::Tensor& parameter)> which = nullptr;

  // What goes home.
  bool weights = true;    // the parameters themselves
  bool gradients = true;  // each gradient when backward has accumulated the next one
  bool states = true;     // of ebb's optimizers, and what is made in an OptimizerStep; as the first call says
};

}  // namespace ebb

#include "test/process/world.h"

#include <iostream>

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <c10/util/Exception.h>

#include "offload/guard.h"
#include "policy/policies.h"

namespace ebb {

Options everything(c10::Device device) {
  Options options;
  options.device = device;
  options.policy = offload_everything();
  return options;
}

at::Tensor forward(const at::Tensor& leaf) {
  at::Tensor x = leaf * 1.5;
  for (int i = 0; i < 4; ++i) {
    x = x.sin() * x.cos();
  }
  return x.exp().sum();
}

World::World(std::int64_t floats, c10::Device device)
    : offloader(std::make_unique<Offloader>(everything(device))),
      leaf(at::linspace(-1, 1, floats, at::TensorOptions(device)).requires_grad_()) {
  forward(leaf).backward();
  expected = leaf.grad();
  build();
}

void World::build() {
  leaf.mutable_grad().reset();
  const OffloadGuard guard(*offloader);
  loss = forward(leaf);
}

void World::drop() {
  loss.reset();
  offloader.reset();
}

std::string World::backward() {
  loss.backward();
  return leaf.grad().equal(expected) ? "exact" : "wrong";
}

void say(const std::string& line) { std::cout << line << std::endl; }

std::string error_of(const std::function<void()>& act) {
  try {
    act();
    return "nothing";
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  }
}

}  // namespace ebb

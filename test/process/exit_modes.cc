// Exits at awkward moments.

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <thread>
#include <utility>

#include <ATen/Functions.h>
#include <ATen/core/Tensor.h>

#include "offload/guard.h"
#include "test/process/modes.h"
#include "test/process/world.h"

namespace ebb {
namespace {

// Of static lifetime, so destroyed after main, in reverse order of these lines.
at::Tensor loss_to_go_last;
std::unique_ptr<World> world;
at::Tensor loss_to_go_first;

void make_world(std::int64_t floats) { world = std::make_unique<World>(floats); }

void graph_before_offloader() {
  make_world(kSmall);
  loss_to_go_first = std::move(world->loss);
}

void graph_after_offloader() {
  make_world(kSmall);
  loss_to_go_last = std::move(world->loss);
}

void globals_in_flight() { make_world(kLarge); }

void exit_in_flight() {
  const World on_the_stack(kLarge);  // never destroyed
  std::exit(0);
}

void exit_under_guard() {
  const World on_the_stack(kLarge);
  const OffloadGuard guard(*on_the_stack.offloader);
  std::exit(0);
}

void exit_from_thread() {
  make_world(kLarge);
  std::thread([] { std::exit(0); }).join();
}

void exit_during_backward() {
  make_world(kLarge);
  world->loss.register_hook([](const at::Tensor&) { std::exit(0); });
  world->loss.backward();
}

constexpr int kEnough = 3;  // steps, for an offloader to say at its end what came of it

void static_offloader() {
  static Offloader offloader(everything(at::kCPU));
  for (int step = 0; step < kEnough; ++step) {
    const OffloadGuard guard(offloader);
    forward(at::ones({kSmall}).requires_grad_()).backward();
  }
}

void offloader_after_log() {
  make_world(kSmall);
  for (int step = 1; step < kEnough; ++step) {
    (void)world->backward();
    world->build();
  }
}

}  // namespace

const Modes kExitModes{
    {"graph_before_offloader", graph_before_offloader},
    {"graph_after_offloader", graph_after_offloader},
    {"globals_in_flight", globals_in_flight},
    {"exit_in_flight", exit_in_flight},
    {"exit_under_guard", exit_under_guard},
    {"exit_from_thread", exit_from_thread},
    {"exit_during_backward", exit_during_backward},
    {"static_offloader", static_offloader},
    {"offloader_after_log", offloader_after_log},
};

}  // namespace ebb

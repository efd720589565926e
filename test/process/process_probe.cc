// A program that test/offload/process_test.cc starts, because what it shows ends a process: exit and fork at awkward
// moments. `process_probe MODE` prints what happened, one line each, and exits 0 unless something unexpected was thrown
// (1), or was not (its line says so). An alarm ends it, and each child, that hangs.

#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <exception>
#include <functional>
#include <iostream>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <ATen/Functions.h>
#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/util/Exception.h>

#include "offload/guard.h"
#include "offload/offloader.h"
#include "policy/everything.h"

namespace ebb {
namespace {

constexpr unsigned kProbeSeconds = 20;
constexpr unsigned kChildSeconds = 8;
constexpr std::int64_t kSmall = 256;                    // floats
constexpr std::int64_t kLarge = std::int64_t{2} << 20;  // 8 MiB: its copies take a while

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

// An offloader and a graph that was made under its guard.
struct World {
  explicit World(std::int64_t floats, c10::Device device = at::kCPU)
      : offloader(std::make_unique<Offloader>(everything(device))),
        leaf(at::linspace(-1, 1, floats, at::TensorOptions(device)).requires_grad_()) {
    forward(leaf).backward();
    expected = leaf.grad();
    build();
  }

  void build() {
    leaf.mutable_grad().reset();
    const OffloadGuard guard(*offloader);
    loss = forward(leaf);
  }

  void drop() {
    loss.reset();
    offloader.reset();
  }

  [[nodiscard]] std::string backward() {
    loss.backward();
    return leaf.grad().equal(expected) ? "exact" : "wrong";
  }

  std::unique_ptr<Offloader> offloader;
  at::Tensor leaf;
  at::Tensor loss;
  at::Tensor expected;
};

void say(const std::string& line) { std::cout << line << std::endl; }

// What `act` throws; "nothing" if nothing.
std::string error_of(const std::function<void()>& act) {
  try {
    act();
    return "nothing";
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  }
}

// Forks; the child does as told and then exits as a program does, by way of all destructors of static objects.
void in_child(const std::function<void()>& act) {
  const pid_t child = fork();
  TORCH_CHECK(child >= 0, "fork failed");
  if (child == 0) {
    alarm(kChildSeconds);
    int status = 0;
    try {
      act();
    } catch (const std::exception& error) {
      say(std::string("child threw: ") + error.what());
      status = 1;
    }
    std::exit(status);
  }
  int status = 0;
  TORCH_CHECK(waitpid(child, &status, 0) == child, "waitpid failed");
  say("child: " + (WIFEXITED(status) ? "exit " + std::to_string(WEXITSTATUS(status))
                                     : "signal " + std::to_string(WTERMSIG(status))));
}

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

void fork_and_exit() {
  make_world(kSmall);
  in_child([] {});
  say(world->backward());
}

void fork_and_exit_at_once() {
  make_world(kSmall);
  in_child([] { _exit(0); });
  say(world->backward());
}

void fork_in_flight() {
  make_world(kLarge);
  in_child([] {});
  say(world->backward());
}

void fork_and_drop() {
  make_world(kLarge);
  in_child([] { world->drop(); });
  say(world->backward());
}

void fork_under_guard() {
  make_world(kSmall);
  auto guard = std::make_unique<OffloadGuard>(*world->offloader);
  in_child([&] {
    say(error_of([] { static_cast<void>(forward(world->leaf)); }));
    guard.reset();
    world->drop();
    say(error_of([] { static_cast<void>(forward(world->leaf)); }));
  });
  guard.reset();
  say(world->backward());
}

void fork_and_ask() {
  make_world(kSmall);
  Offloader& offloader = *world->offloader;
  in_child([&] {
    say(error_of([&] { static_cast<void>(offloader.stats()); }));
    say(error_of([&] { offloader.reset_stats(); }));
    say(error_of([&] { offloader.drain(); }));
    say(error_of([&] { offloader.exclude(world->leaf); }));
    say(error_of([&] { static_cast<void>(offloader.take_timeline()); }));
    say(error_of([&] { const OffloadGuard guard(offloader); }));
  });
  say(world->backward());
}

void fork_and_unpack() {
  make_world(kSmall);
  in_child([] {
    say(error_of([] { world->loss.backward(); }));
    say(error_of([] { world->loss.backward(); }));
  });
  say(world->backward());
}

void fork_and_make_own() {
  make_world(kSmall);
  in_child([] {
    World own(kSmall);
    say(own.backward());
    say("moved: " + std::to_string(own.offloader->stats().offloaded.tensors));
    own.build();
    in_child([&] { say(error_of([&] { own.loss.backward(); })); });
    say(own.backward());
  });
  say(world->backward());
}

// Saves that pass through ebb are LibTorch's own affair: parameters need none of ebb's threads.
void fork_and_use_kept() {
  Offloader offloader(everything(at::kCPU));
  const at::Tensor weight = at::ones({4}).requires_grad_();
  at::Tensor loss;
  {
    const OffloadGuard guard(offloader);
    loss = (weight * weight).sum();
  }
  in_child([&] {
    loss.backward();
    say(weight.grad().equal(at::full({4}, 2.0F)) ? "exact" : "wrong");
  });
}

// Forks again and again while other threads hold now this lock of ebb's, now that one.
void fork_among_threads() {
  constexpr int kForks = 10;
  make_world(kSmall);
  std::atomic<bool> enough{false};
  std::vector<std::thread> threads;
  for (int i = 0; i < 2; ++i) {
    threads.emplace_back([&] {
      while (!enough) {
        const OffloadGuard guard(*world->offloader);
        forward(at::ones({kSmall}).requires_grad_()).backward();
      }
    });
  }
  for (int i = 0; i < kForks; ++i) {
    in_child([] {
      say(error_of([] { static_cast<void>(world->offloader->stats()); }).substr(0, 19));
      world->drop();
    });
  }
  enough = true;
  for (std::thread& thread : threads) {
    thread.join();
  }
  say(world->backward());
}

void fork_on_gpu() {
  World on_gpu(kSmall, c10::Device(c10::kCUDA, c10::cuda::current_device()));
  in_child([&] {
    say(error_of([&] { static_cast<void>(on_gpu.offloader->stats()); }));
    _exit(0);  // what CUDA's own destructors do in a child is not ours to say
  });
  say(on_gpu.backward());
}

const std::map<std::string, void (*)()> kModes{
    {"graph_before_offloader", graph_before_offloader},
    {"graph_after_offloader", graph_after_offloader},
    {"globals_in_flight", globals_in_flight},
    {"exit_in_flight", exit_in_flight},
    {"exit_under_guard", exit_under_guard},
    {"exit_from_thread", exit_from_thread},
    {"exit_during_backward", exit_during_backward},
    {"fork_and_exit", fork_and_exit},
    {"fork_and_exit_at_once", fork_and_exit_at_once},
    {"fork_in_flight", fork_in_flight},
    {"fork_and_drop", fork_and_drop},
    {"fork_under_guard", fork_under_guard},
    {"fork_and_ask", fork_and_ask},
    {"fork_and_unpack", fork_and_unpack},
    {"fork_and_make_own", fork_and_make_own},
    {"fork_and_use_kept", fork_and_use_kept},
    {"fork_among_threads", fork_among_threads},
    {"fork_on_gpu", fork_on_gpu},
};

}  // namespace
}  // namespace ebb

int main(int argc, char** argv) {
  alarm(ebb::kProbeSeconds);
  at::set_num_threads(1);  // libgomp's threads do not survive fork either, and nothing here needs them
  const auto mode = ebb::kModes.find(argc == 2 ? argv[1] : "");
  if (mode == ebb::kModes.end()) {
    std::cerr << "usage: process_probe MODE\n";
    return 2;
  }
  try {
    mode->second();
    return 0;
  } catch (const std::exception& error) {
    ebb::say(error.what());
    return 1;
  }
}

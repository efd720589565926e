// Forks at awkward moments.

#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/util/Exception.h>

#include "offload/checkpoint.h"
#include "offload/guard.h"
#include "offload/optimizer.h"
#include "offload/parameters.h"
#include "test/process/modes.h"
#include "test/process/world.h"
#include "test/simulated/simulated_tier.h"

namespace ebb {
namespace {

constexpr unsigned kChildSeconds = 8;

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

std::unique_ptr<World> world;  // of static lifetime: a child destroys its copy after main

void make_world(std::int64_t floats) { world = std::make_unique<World>(floats); }

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

void fork_with_managed() {
  make_world(kSmall);
  Parameters none_on_device;
  none_on_device.minimum_bytes = 0;
  std::vector<at::Tensor> weights;
  for (int i = 0; i < 2; ++i) {
    weights.push_back(at::full({kLarge}, 1.0 + i));
  }
  none_on_device.device_bytes = weights.front().nbytes();
  world->offloader->manage(weights, none_on_device);
  weights[0].add_(1);
  weights[1].add_(1);  // the first is on its way home
  in_child([&] {
    say(error_of([&] { weights[0].add_(1); }));
    say(error_of([&] { weights[1].add_(1); }));
    say(error_of([&] { world->offloader->manage({at::ones({4})}, {}); }));
    weights.clear();
    world->drop();
  });
  say(weights[0].eq(2).all().item<bool>() && weights[1].eq(3).all().item<bool>() ? "exact" : "wrong");
  weights.clear();
  say(world->backward());
}

// The child has no thread of the optimizer's.
void fork_with_optimizer() {
  // Whose homes are memory, as a GPU's are.
  auto offloader = std::make_unique<Offloader>(
      everything(at::kCPU),
      std::make_shared<SimulatedTier>(Schedule::kLate, 0, std::nullopt, /*deferred_compute=*/false));
  Parameters none_on_device;
  none_on_device.minimum_bytes = 0;
  none_on_device.device_bytes = 0;
  at::Tensor weight = at::ones({kLarge}).requires_grad_();
  offloader->manage({weight}, none_on_device);
  auto optimizer = std::make_unique<SGD>(std::vector{weight}, torch::optim::SGDOptions(1).momentum(0.5),
                                         UpdateIn::kBackward, UpdateOn::kCpu);
  const auto step = [&] {
    weight.sum().backward();
    optimizer->step();
  };
  step();
  step();
  in_child([&] {
    say(error_of(step));
    optimizer.reset();
    weight.reset();
    offloader.reset();
  });
  say(weight.detach().eq(-1.5).all().item<bool>() ? "exact" : "wrong");
}

void fork_and_unpack() {
  make_world(kSmall);
  in_child([] {
    say(error_of([] { world->loss.backward(); }));
    say(error_of([] { world->loss.backward(); }));
  });
  say(world->backward());
}

// The child asks for what the second run, which it was forked in, would have to make: through a node that the parent's
// backward has not come to, as LibTorch locks the one that it is in.
void fork_in_second_run() {
  int run = 0;
  std::vector<at::Tensor> outputs;
  const at::Tensor leaf = at::arange(64, at::kFloat).requires_grad_();
  outputs = checkpoint(
      [&](const std::vector<at::Tensor>& x) {
        if (++run == 2) {
          in_child([&] {
            say(error_of([&] { outputs[0].sum().backward(); }));
            outputs.clear();
          });
        }
        const at::Tensor sine = x[0].sin();
        return std::vector<at::Tensor>{sine, sine.exp()};
      },
      {leaf});
  outputs[1].sum().backward();
  say(leaf.grad().equal(leaf.detach().sin().exp() * leaf.detach().cos()) ? "exact" : "wrong");
}

// No second run is under way: the child has all that it needs.
void fork_between_runs() {
  const at::Tensor leaf = at::arange(64, at::kFloat).requires_grad_();
  const at::Tensor loss =
      checkpoint([](const std::vector<at::Tensor>& x) { return std::vector<at::Tensor>{x[0].sin().exp()}; }, {leaf})
          .front()
          .sum();
  in_child([&] {
    loss.backward();
    say(leaf.grad().equal(leaf.detach().cos() * leaf.detach().sin().exp()) ? "exact" : "wrong");
  });
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
  constexpr int kThreads = 2;
  make_world(kSmall);
  std::atomic<bool> enough{false};
  std::vector<std::thread> threads;
  threads.reserve(kThreads);
  for (int i = 0; i < kThreads; ++i) {
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

// As fork_among_threads, for the locks of managed tensors: a thousand times, as few forks find one locked.
void fork_beside_managed_training() {
  constexpr int kForks = 1000;
  constexpr int kOwn = 20;  // each so many a child makes an offloader of its own
  constexpr unsigned kForksSeconds = 120;
  make_world(kSmall);
  Parameters none_on_device;
  none_on_device.minimum_bytes = 0;
  none_on_device.device_bytes = 0;
  std::vector<at::Tensor> weights;
  for (int i = 0; i < 4; ++i) {
    weights.push_back(at::ones({kSmall}).requires_grad_());
  }
  world->offloader->manage(weights, none_on_device);
  std::atomic<bool> enough{false};
  std::thread training([&] {
    while (!enough) {
      for (const at::Tensor& weight : weights) {
        weight.mul(2).sum().backward();
        weight.mutable_grad().reset();
      }
    }
  });
  alarm(kForksSeconds);
  int well = 0;
  for (int i = 0; i < kForks; ++i) {
    const pid_t child = fork();
    TORCH_CHECK(child >= 0, "fork failed");
    if (child == 0) {
      alarm(kChildSeconds);
      bool is_exact = true;
      const std::string refused = error_of([&] { static_cast<void>(weights[0].detach().sum()); });
      const std::string own = i % kOwn != 0 ? "nothing" : error_of([&] {
        Offloader offloader(everything(at::kCPU));
        const at::Tensor tensor = at::ones({kSmall});
        offloader.manage({tensor}, none_on_device);
        tensor.mul_(2);
        is_exact = tensor.eq(2).all().item<bool>();
      });
      _exit(refused.starts_with("ebb: this offloader") && own == "nothing" && is_exact ? 0 : 1);
    }
    int status = 0;
    TORCH_CHECK(waitpid(child, &status, 0) == child, "waitpid failed");
    well += status == 0 ? 1 : 0;
  }
  enough = true;
  training.join();
  say("children that ended well: " + std::to_string(well));
}

void fork_on_gpu() {
  World on_gpu(kSmall, c10::Device(c10::kCUDA, c10::cuda::current_device()));
  in_child([&] {
    say(error_of([&] { static_cast<void>(on_gpu.offloader->stats()); }));
    _exit(0);  // what CUDA's own destructors do in a child is not ours to say
  });
  say(on_gpu.backward());
}

}  // namespace

const Modes kForkModes{
    {"fork_and_exit", fork_and_exit},
    {"fork_and_exit_at_once", fork_and_exit_at_once},
    {"fork_in_flight", fork_in_flight},
    {"fork_and_drop", fork_and_drop},
    {"fork_under_guard", fork_under_guard},
    {"fork_and_ask", fork_and_ask},
    {"fork_with_managed", fork_with_managed},
    {"fork_with_optimizer", fork_with_optimizer},
    {"fork_and_unpack", fork_and_unpack},
    {"fork_in_second_run", fork_in_second_run},
    {"fork_between_runs", fork_between_runs},
    {"fork_and_make_own", fork_and_make_own},
    {"fork_and_use_kept", fork_and_use_kept},
    {"fork_among_threads", fork_among_threads},
    {"fork_beside_managed_training", fork_beside_managed_training},
    {"fork_on_gpu", fork_on_gpu},
};

}  // namespace ebb

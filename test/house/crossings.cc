// Which functions of the library run for one save and for one next use of a weight: prints each call that
// -finstrument-functions reports on the main thread, as "call scenario address depth". crossings.py builds and reads
// this.

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <vector>

#include <torch/torch.h>

#include "offload/guard.h"
#include "offload/offloader.h"
#include "offload/optimizer.h"
#include "policy/policies.h"

namespace {

struct Call {
  void* function;
  int depth;
};

thread_local bool records = false;
thread_local int depth = 0;
std::vector<Call> calls;

// Prints what has been called while this lived.
class Scenario {
 public:
  __attribute__((no_instrument_function)) explicit Scenario(const char* name) : name_(name) {
    calls.clear();
    depth = 0;
    records = true;
  }
  __attribute__((no_instrument_function)) ~Scenario() {
    records = false;
    for (const Call& call : calls) {
      std::printf("call %s %p %d\n", name_, call.function, call.depth);
    }
  }
  Scenario(const Scenario&) = delete;
  Scenario& operator=(const Scenario&) = delete;

 private:
  const char* const name_;
};

constexpr std::size_t kManyCalls = 1 << 20;
constexpr int kWarmUps = 4;

void save() {
  ebb::Options options;
  options.device = at::kCPU;
  options.policy = ebb::minimum_size(1 << 20);
  options.spill_folder = "/tmp";
  ebb::Offloader offloader(options);
  for (int step = 0; step <= kWarmUps; ++step) {
    at::Tensor x = at::ones({1 << 19}).requires_grad_();
    {
      const ebb::OffloadGuard guard(offloader);
      for (int i = 0; i < 3; ++i) {
        x = at::silu(x);
      }
      std::unique_ptr<Scenario> scenario = step == kWarmUps ? std::make_unique<Scenario>("save_out") : nullptr;
      x = at::silu(x);
    }
    {
      std::unique_ptr<Scenario> scenario = step == kWarmUps ? std::make_unique<Scenario>("backward") : nullptr;
      x.sum().backward();
    }
  }
}

void next_use() {
  ebb::Options options;
  options.device = at::kCPU;
  options.spill_folder = "/tmp";
  ebb::Offloader offloader(options);
  constexpr std::int64_t kWidth = 1024;
  constexpr std::uint64_t kBound = 24 << 20;
  std::vector<at::Tensor> weights;
  for (int i = 0; i < 4; ++i) {
    weights.push_back((at::rand({kWidth, kWidth}) / kWidth).requires_grad_());
  }
  {
    const Scenario scenario("manage");
    offloader.manage(weights, {.device_bytes = kBound});
  }
  ebb::AdamW optimizer(weights, {}, ebb::UpdateIn::kNextUse);
  for (int step = 0; step <= kWarmUps; ++step) {
    at::Tensor x = at::ones({8, kWidth});
    for (std::size_t i = 0; i < weights.size(); ++i) {
      std::unique_ptr<Scenario> scenario =
          step == kWarmUps && i == 1 ? std::make_unique<Scenario>("next_use") : nullptr;
      x = x.matmul(weights[i]);
    }
    x.sum().backward();
    std::unique_ptr<Scenario> scenario = step == kWarmUps ? std::make_unique<Scenario>("step") : nullptr;
    optimizer.step();
    optimizer.zero_grad();
  }
}

}  // namespace

extern "C" {

__attribute__((no_instrument_function)) void __cyg_profile_func_enter(void* function, void* /*caller*/) {
  if (records) {
    if (calls.size() < kManyCalls) {
      calls.push_back({function, depth});
    }
    ++depth;
  }
}

__attribute__((no_instrument_function)) void __cyg_profile_func_exit(void* /*function*/, void* /*caller*/) {
  if (records) {
    --depth;
  }
}
}

int main() {
  calls.reserve(kManyCalls);
  save();
  next_use();
  return 0;
}

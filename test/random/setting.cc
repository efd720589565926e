#include "test/random/setting.h"

#include <array>
#include <chrono>
#include <sstream>
#include <thread>
#include <utility>
#include <vector>

#include <c10/core/CPUAllocator.h>

#include "policy/policies.h"
#include "test/random/ready_queue.h"

namespace ebb::graphs {
namespace {

constexpr std::array kPlaces{"simulated", "disk", "disk by threads", "pinned", "pageable", "pinned, on compute stream"};
constexpr std::array kSchedules{"late", "early", "random"};
constexpr std::array kChoices{"everything", "minimum_size", "callback", "except",
                              "only",       "recompute",    "anything", "plan"};

template <std::size_t N, typename Enum>
const char* name(const std::array<const char*, N>& names, Enum value) {
  return names[static_cast<std::size_t>(value)];
}

OperationNames common_operations() {
  return {"MulBackward0", "SinBackward0", "DivBackward0", "AddBackward0", "TanhBackward0", "SiluBackward0"};
}

// Keeps, moves or recomputes, as it comes.
class Anything final : public Policy {
 public:
  explicit Anything(std::uint64_t seed) : random_(seed, 0) {}
  void begin_step() override {}
  [[nodiscard]] Decision decide(const Candidate& candidate) override {
    if (candidate.recompute != Recompute::kNo && random_.percent(60)) {
      return Decision::kRecompute;
    }
    return random_.percent(60) ? Decision::kOffload : Decision::kKeep;
  }
  [[nodiscard]] bool needs_operation() const override { return false; }
  [[nodiscard]] bool needs_recompute() const override { return true; }

 private:
  Random random_;
};

std::shared_ptr<Policy> make_policy(const Setting& setting) {
  switch (setting.policy) {
    case Choice::kMinimumSize:
      return minimum_size(setting.minimum_bytes);
    case Choice::kCallback:
      return callback([seed = setting.seed](const Candidate& candidate) {
        return Random(seed, candidate.ordinal).percent(50) ? Decision::kOffload : Decision::kKeep;
      });
    case Choice::kExcept:
      return except_operations(common_operations());
    case Choice::kOnly:
      return only_operations(common_operations());
    case Choice::kRecompute:
      return recompute(Recompute::kComputeBound);
    case Choice::kAnything:
      return std::make_shared<Anything>(setting.seed);
    case Choice::kPlan:
      return nullptr;
    case Choice::kEverything:
      break;
  }
  return offload_everything();
}

// Of a device that gives figures at random: what is planned with them may be bad, and must not be wrong.
void set_budget(Options& options, std::uint64_t seed) {
  auto random = std::make_shared<Random>(seed, 1);
  const std::size_t goal = random->below(5);
  if (goal == 0) {
    options.device_budget = LeastMemory{};
  } else if (goal == 1) {
    options.device_budget = Slowdown{0.1 * static_cast<double>(random->below(20))};
  } else if (goal == 2) {
    options.device_budget = DeviceBytes{std::uint64_t{1} << 40};
  } else {
    options.device_budget = DeviceBytes{1 + random->below(std::size_t{1} << (8 + random->below(12)))};
  }
  options.device_budget_is_a_wish = true;
  options.planned_minimum_bytes = 1;
  options.policy = nullptr;
  options.stash_bytes.reset();
  options.window_bytes.reset();
  if (random->percent(50)) {
    options.device_meter = [random] {
      const std::uint64_t now = random->below(64 << 10);
      return DeviceUse{now, now + random->below(4 << 10)};
    };
  }
}

// Keeps what is larger than the window, as a user must who sets one: what is larger is an error otherwise.
std::shared_ptr<Policy> keep_over(std::uint64_t bytes, std::shared_ptr<Policy> inner) {
  return callback(
      [bytes](const Candidate& candidate) { return candidate.bytes > bytes ? Decision::kKeep : Decision::kOffload; },
      std::move(inner));
}

Place random_place(Random& random, c10::Device device) {
  if (device.is_cuda()) {
    return random.one_of(std::array{Place::kPinned, Place::kPinned, Place::kPinned, Place::kPinned, Place::kPageable});
  }
  if (!random.percent(15)) return Place::kSimulated;
  return random.percent(50) ? Place::kDisk : Place::kDiskByThreads;
}

std::optional<std::uint64_t> random_size(Random& random, std::vector<std::uint64_t> sizes, std::size_t chance) {
  return random.percent(chance) ? std::optional(random.one_of(sizes)) : std::nullopt;
}

}  // namespace

Setting random_setting(Random& random, c10::Device device) {
  Setting setting;
  setting.place = random_place(random, device);
  setting.schedule = random.one_of(std::array{Schedule::kLate, Schedule::kLate, Schedule::kEarly, Schedule::kRandom});
  setting.seed = random.below(1000);
  if (random.percent(50)) {
    setting.policy = random.one_of(std::array{
        Choice::kMinimumSize, Choice::kCallback, Choice::kExcept, Choice::kOnly, Choice::kRecompute, Choice::kRecompute,
        Choice::kAnything, Choice::kAnything, Choice::kAnything, Choice::kPlan, Choice::kPlan, Choice::kPlan});
    setting.minimum_bytes = std::uint64_t{1} << random.below(10);
  }
  setting.stash_bytes = random_size(random, {1, 1, 1, 256, 4 << 10, 1 << 20}, 75);
  setting.window_bytes = random_size(random, {256 << 10, 512 << 10}, 50);
  setting.capacity_bytes = random_size(random, {4 << 10, 16 << 10, 64 << 10, 1 << 20}, 25);
  setting.passes = 1 + static_cast<int>(random.below(3));
  if (setting.policy != Choice::kEverything && random.percent(30)) {
    setting.evict_percent = 1 + random.below(40);
  }
  if (setting.policy == Choice::kPlan) {
    setting.passes += random.percent(80) ? 3 : 8;  // steps that fit rest once one was measured
  } else if (setting.policy == Choice::kRecompute || setting.policy == Choice::kAnything) {
    ++setting.passes;  // the first one proves recipes
  }
  if (const auto bytes = random_size(random, {0, 0, 256, 4 << 10, 1 << 20}, 25)) {
    setting.managed = {*bytes, setting.policy == Choice::kPlan && random.percent(50)};
  }
  return setting;
}

std::string to_text(const Setting& setting) {
  std::ostringstream out;
  out << name(kPlaces, setting.place);
  if (setting.place == Place::kSimulated) {
    out << ", " << name(kSchedules, setting.schedule);
  }
  out << ", seed " << setting.seed << ", policy " << name(kChoices, setting.policy);
  if (setting.policy == Choice::kMinimumSize) {
    out << "(" << setting.minimum_bytes << ")";
  }
  const auto print = [&out](const char* what, const std::optional<std::uint64_t>& bytes) {
    if (bytes) out << ", " << what << " " << *bytes << " B";
  };
  print("stash", setting.stash_bytes);
  print("window", setting.window_bytes);
  print("capacity", setting.capacity_bytes);
  if (setting.managed) {
    out << ", leaves managed within "
        << (setting.managed->by_plan ? "what a plan says" : std::to_string(setting.managed->device_bytes) + " B");
  }
  if (setting.evict_percent > 0) {
    out << ", evicting at " << setting.evict_percent << " %";
  }
  out << ", passes " << setting.passes;
  return out.str();
}

Rig::Rig(const Setting& setting, c10::Device device, const WrapTier& wrap)
    : first_(make(setting, device, wrap)), second_(make(setting, device, wrap)) {
  if (setting.evict_percent > 0 && device.is_cpu()) {
    evict_at_random(setting.seed, setting.evict_percent);
  }
}

Rig::~Rig() {
  if (evicting_ != nullptr) {
    evicting_->before_each({});
  }
}

// From whatever thread asks for memory, and whatever it holds then, as LibTorch's allocator for a GPU does.
void Rig::evict_at_random(std::uint64_t seed, std::size_t percent) {
  evicting_ = dynamic_cast<SimulatedDeviceAllocator*>(c10::GetCPUAllocator());
  if (evicting_ == nullptr) {
    return;
  }
  evicting_->before_each([this, seed, percent] {
    Random random(seed, requests_++);
    if (random.percent(percent)) {
      (random.percent(50) ? first_ : second_).offloader->evict(1 + random.below(std::size_t{1} << random.below(16)));
    }
  });
}

Rig::Half Rig::make(const Setting& setting, c10::Device device, const WrapTier& wrap) {
  Options options;
  options.device = device;
  options.policy = make_policy(setting);
  options.stash_bytes = setting.stash_bytes;
  options.window_bytes = setting.window_bytes;
  if (setting.policy == Choice::kPlan) {
    set_budget(options, setting.seed);
  } else if (setting.window_bytes) {
    options.policy = keep_over(*setting.window_bytes, std::move(options.policy));
  }
  options.capacity_bytes = setting.capacity_bytes;
  options.host_memory_warning = 1;
  if (setting.place == Place::kSimulated) {
    auto simulated = std::make_shared<SimulatedTier>(setting.schedule, setting.seed, setting.capacity_bytes,
                                                     /*deferred_compute=*/false);
    auto offloader = std::make_unique<Offloader>(options, wrap ? wrap(simulated) : simulated);
    return {std::move(simulated), std::move(offloader)};
  }
  options.disk_io = setting.place == Place::kDiskByThreads ? DiskIo::kThreads : DiskIo::kAuto;
  options.host_memory = setting.place == Place::kPageable ? HostMemory::kPageable : HostMemory::kPinned;
  return {nullptr, std::make_unique<Offloader>(options)};
}

std::vector<Offloader*> Rig::offloaders() const { return {first_.offloader.get(), second_.offloader.get()}; }

Stats Rig::stats() const { return first_.offloader->stats(); }

std::optional<std::string> Rig::leftover() {
  // LibTorch's threads for devices and for nested passes let go of what they have run after backward has returned.
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(1);
  std::optional<std::string> left = held();
  while (left && std::chrono::steady_clock::now() < deadline) {
    std::this_thread::sleep_for(std::chrono::microseconds(200));
    left = held();
  }
  return left;
}

std::optional<std::string> Rig::held() {
  empty_ready_queue();
  for (Offloader* offloader : offloaders()) {  // first all: one's stash may hold what the other fetched
    offloader->drain();
  }
  for (const Half* half : {&first_, &second_}) {
    const Stats stats = half->offloader->stats();
    const std::array<std::pair<const char*, std::uint64_t>, 5> held{
        {{"pool", stats.pool.now_bytes},
         {"stash", stats.stash.now_bytes},
         {"window", stats.window.now_bytes},
         {"saved on device", stats.saved_on_device.now_bytes},
         {"simulated device", half->simulated ? half->simulated->device_bytes().now : 0}}};
    for (const auto& [where, bytes] : held) {
      if (bytes > 0) {
        return std::to_string(bytes) + " bytes left: " + where;
      }
    }
  }
  return std::nullopt;
}

}  // namespace ebb::graphs

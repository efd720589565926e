#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "offload/offloader.h"
#include "offload/options.h"
#include "test/random/managed_leaves.h"
#include "test/random/random.h"
#include "test/simulated/simulated_device_allocator.h"
#include "test/simulated/simulated_queues.h"
#include "test/simulated/simulated_tier.h"

namespace ebb::graphs {

enum class Place : std::uint8_t { kSimulated, kDisk, kDiskByThreads, kPinned, kPageable };
enum class Choice : std::uint8_t {
  kEverything,
  kMinimumSize,
  kCallback,
  kExcept,
  kOnly,
  kRecompute,
  kAnything,
  kPlan  // no policy, but a budget
};

// How a program is offloaded. Policies have a state, so this says which to make.
struct Setting {
  Place place = Place::kSimulated;
  Schedule schedule = Schedule::kLate;
  std::uint64_t seed = 0;  // of Schedule::kRandom, Choice::kCallback, kAnything and kPlan
  Choice policy = Choice::kEverything;
  std::uint64_t minimum_bytes = 0;  // of Choice::kMinimumSize
  std::optional<std::uint64_t> stash_bytes;
  std::optional<std::uint64_t> window_bytes;
  std::optional<std::uint64_t> capacity_bytes;
  std::optional<ManagedLeaves> managed;
  std::size_t evict_percent = 0;  // of the requests for memory on the CPU: so many evict what was kept, in part
  int passes = 1;  // the second one knows sizes, order and recipes; with Choice::kPlan the third one follows a plan
};

// For the CPU: simulated tiers mostly, the real disk sometimes. For a GPU: the real PinnedTier.
[[nodiscard]] Setting random_setting(Random& random, c10::Device device);

[[nodiscard]] std::string to_text(const Setting& setting);

// Puts something between an offloader and its simulated tier.
using WrapTier = std::function<std::shared_ptr<Tier>(std::shared_ptr<Tier>)>;

// Two offloaders of one setting, for guards to nest.
class Rig {
 public:
  Rig(const Setting& setting, c10::Device device, const WrapTier& wrap = {});
  ~Rig();
  Rig(const Rig&) = delete;
  Rig& operator=(const Rig&) = delete;

  [[nodiscard]] std::vector<Offloader*> offloaders() const;
  [[nodiscard]] Stats stats() const;  // of the first

  // What is held although no graph is left; nothing if nothing is.
  [[nodiscard]] std::optional<std::string> leftover();

 private:
  [[nodiscard]] std::optional<std::string> held();
  void evict_at_random(std::uint64_t seed, std::size_t percent);

  struct Half {
    std::shared_ptr<SimulatedTier> simulated;
    std::unique_ptr<Offloader> offloader;
  };
  [[nodiscard]] static Half make(const Setting& setting, c10::Device device, const WrapTier& wrap);

  const Half first_;
  const Half second_;
  SimulatedDeviceAllocator* evicting_ = nullptr;  // that calls on this rig
  std::atomic<std::uint64_t> requests_{0};
};

}  // namespace ebb::graphs

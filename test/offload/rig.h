#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "offload/guard.h"
#include "offload/offloader.h"
#include "offload/options.h"
#include "offload/stats.h"
#include "test/simulated/simulated_tier.h"

namespace ebb {

// An offloader to test with.
struct Setting {
  std::string name;
  Options options;
  std::optional<Schedule> schedule;  // of a SimulatedTier; nullopt: the real DiskTier
  std::uint64_t seed = 0;
};

// Everything moves, through a tier whose copies run as late as the waits allow.
[[nodiscard]] Setting late();

// As late(), and no source outlives its save in the stash: backward has to copy in.
[[nodiscard]] Setting late_without_stash();

// As late_without_stash(), on the real DiskTier.
[[nodiscard]] Setting disk();

// These, and others that differ in schedule, seed, sizes and policy.
[[nodiscard]] std::vector<Setting> all_settings();

// Three of those, for what takes long: late_without_stash(), disk(), and copies in random order.
[[nodiscard]] std::vector<Setting> some_settings();

// A setting's SimulatedTier; null where it asks for the real DiskTier.
[[nodiscard]] std::shared_ptr<SimulatedTier> make_tier(const Setting& setting);

// A setting's offloader, over a tier of make_tier.
[[nodiscard]] std::unique_ptr<Offloader> make_offloader(const Setting& setting, std::shared_ptr<SimulatedTier> tier);

// An offloader made by a setting. At its end it checks that ebb holds nothing any more, on the device or in the tier.
class Rig {
 public:
  explicit Rig(const Setting& setting);
  ~Rig();
  Rig(const Rig&) = delete;
  Rig& operator=(const Rig&) = delete;

  [[nodiscard]] Offloader& offloader() { return *offloader_; }
  [[nodiscard]] SimulatedTier& tier() { return *simulated_; }
  [[nodiscard]] Stats stats() const { return offloader_->stats(); }

  // With all graphs gone: every gauge is at zero once the copies under way are done.
  void check_empty();

 private:
  std::shared_ptr<SimulatedTier> simulated_;
  std::unique_ptr<Offloader> offloader_;
};

// A guard that can be ended anywhere.
[[nodiscard]] std::unique_ptr<OffloadGuard> guard_on(Rig& rig);

// How many of the saves made here go to the rig's offloader: one, or none.
[[nodiscard]] std::uint64_t seen_by(const Rig& rig);

}  // namespace ebb

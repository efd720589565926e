#include "bench/link/rows.h"

#include <array>
#include <cstddef>
#include <utility>
#include <vector>

#include "bench/common/percentile.h"
#include "bench/link/pinned_tier_rate.h"
#include "bench/link/raw_link.h"
#include "examples/common/device.h"

namespace ebb {
namespace {

// The largest first: an idle link may have been slowed down to save power, and is awake when small copies come.
constexpr std::array<std::size_t, 10> kPinnedSizes{
    std::size_t{1} << 30, 256 << 20, 64 << 20, 16 << 20, 4 << 20, 1 << 20, 256 << 10, 64 << 10, 16 << 10, 4 << 10};
constexpr std::array<std::size_t, 4> kPageableSizes{256 << 20, 16 << 20, 1 << 20, 64 << 10};
constexpr std::array<std::size_t, 5> kTierSizes{64 << 20, 256 << 10, 64 << 10, 16 << 10, 4 << 10};

struct Case {
  const char* direction;
  bool both_directions;
};
constexpr std::array<Case, 4> kCases{
    {{"device_to_host", false}, {"host_to_device", false}, {"device_to_host", true}, {"host_to_device", true}}};

std::array<CopyRate, kCases.size()> measure(RawLink& link, std::size_t bytes) {
  const CopyRate out = link.alone(Direction::kDeviceToHost, bytes);
  const CopyRate in = link.alone(Direction::kHostToDevice, bytes);
  const auto [out_of_both, in_of_both] = link.together(bytes);
  return {out, in, out_of_both, in_of_both};
}

// Of copies that are queued within a fraction of the time that they take; else the host's clock cannot tell when each
// lane was how far, and only the cases with one direction are measured.
constexpr std::size_t kLeastBytesForBoth = 1 << 20;

std::vector<double> measure(PinnedTierRate& tier, std::size_t bytes) {
  std::vector<double> rates{tier.alone(Direction::kDeviceToHost), tier.alone(Direction::kHostToDevice)};
  if (bytes >= kLeastBytesForBoth) {
    const auto [out_of_both, in_of_both] = tier.together();
    rates.insert(rates.end(), {out_of_both, in_of_both});
  }
  return rates;
}

struct Samples {
  std::vector<double> gb_per_s;
  std::vector<double> enqueue_us;
  bool queued_ahead = true;
};

nlohmann::json make_row(c10::Device device, const char* measure, const Case& which, std::size_t bytes, int repetitions,
                        const std::vector<double>& gb_per_s) {
  nlohmann::json row{{"measure", measure},  {"direction", which.direction}, {"both_directions", which.both_directions},
                     {"copy_bytes", bytes}, {"repetitions", repetitions},   {"device", device_name(device)}};
  add_spread(row, "gb_per_s", gb_per_s);
  return row;
}

void add_raw_rows(c10::Device device, RawLink& link, const char* memory, std::size_t bytes, int repetitions,
                  ResultRows& rows) {
  std::array<Samples, kCases.size()> samples;
  measure(link, bytes);  // the one that does not count
  for (int i = 0; i < repetitions; ++i) {
    const auto rates = measure(link, bytes);
    for (std::size_t which = 0; which < kCases.size(); ++which) {
      samples[which].gb_per_s.push_back(rates[which].gb_per_s);
      samples[which].enqueue_us.push_back(rates[which].enqueue_us_each);
      samples[which].queued_ahead = samples[which].queued_ahead && rates[which].queued_ahead;
    }
  }
  for (std::size_t which = 0; which < kCases.size(); ++which) {
    nlohmann::json row = make_row(device, "link", kCases[which], bytes, repetitions, samples[which].gb_per_s);
    constexpr double kBytesPerUsInGbPerS = 1e3;
    row["memory"] = memory;
    row["copies"] = link.copies(bytes);
    row["us_per_copy_median"] =
        static_cast<double>(bytes) / kBytesPerUsInGbPerS / percentile(samples[which].gb_per_s, 0.5);
    row["enqueue_us_median"] = percentile(samples[which].enqueue_us, 0.5);
    row["queued_ahead"] = samples[which].queued_ahead;
    rows.add(std::move(row));
  }
}

void add_tier_rows(c10::Device device, RawLink& link, std::size_t bytes, int repetitions, ResultRows& rows) {
  PinnedTierRate tier(device, bytes);
  std::array<std::vector<double>, kCases.size()> raw_gb_per_s;
  std::array<std::vector<double>, kCases.size()> tier_gb_per_s;
  std::array<std::vector<double>, kCases.size()> ratios;
  measure(link, bytes);
  const std::size_t cases = measure(tier, bytes).size();  // the one that does not count
  for (int i = 0; i < repetitions; ++i) {
    const auto raw_rates = measure(link, bytes);
    const auto tier_rates = measure(tier, bytes);
    for (std::size_t which = 0; which < cases; ++which) {
      raw_gb_per_s[which].push_back(raw_rates[which].gb_per_s);
      tier_gb_per_s[which].push_back(tier_rates[which]);
      ratios[which].push_back(tier_rates[which] / raw_rates[which].gb_per_s);
    }
  }
  for (std::size_t which = 0; which < cases; ++which) {
    nlohmann::json row = make_row(device, "pinned_tier", kCases[which], bytes, repetitions, tier_gb_per_s[which]);
    row["copies"] = tier.copies();
    add_spread(row, "raw_gb_per_s", raw_gb_per_s[which]);
    add_spread(row, "over_raw", ratios[which]);
    rows.add(std::move(row));
  }
}

}  // namespace

void add_link_rows(c10::Device device, int repetitions, ResultRows& rows) {
  {
    RawLink pinned(device, /*pinned=*/true);
    for (const std::size_t bytes : kPinnedSizes) {
      add_raw_rows(device, pinned, "pinned", bytes, repetitions, rows);
    }
    for (const std::size_t bytes : kTierSizes) {
      add_tier_rows(device, pinned, bytes, repetitions, rows);
    }
  }
  RawLink pageable(device, /*pinned=*/false);
  for (const std::size_t bytes : kPageableSizes) {
    add_raw_rows(device, pageable, "pageable", bytes, repetitions, rows);
  }
}

}  // namespace ebb

#include "bench/train/report.h"

#include <algorithm>
#include <array>
#include <bit>

#include <ATen/Context.h>
#include <nlohmann/json.hpp>

#include "bench/whole_file.h"

namespace ebb {
namespace {

using Json = nlohmann::ordered_json;

constexpr std::array kRecomputeNames{"none", "cheap", "all"};  // by Recompute

Json config_of(const TrainOptions& o) {
  return {{"vocab", o.model.vocab},
          {"dim", o.model.dim},
          {"layers", o.model.layers},
          {"heads", o.model.heads},
          {"kv_heads", o.model.kv_heads},
          {"ffn", o.model.ffn},
          {"parameters", parameter_count(o.model)},
          {"batch", o.batch},
          {"seq", o.seq},
          {"learning_rate", o.learning_rate},
          {"weight_decay", o.weight_decay},
          {"warmup", o.warmup},
          {"seed", o.seed},
          {"offload", o.offload},
          {"minimum_bytes", o.minimum_bytes},
          {"recompute", kRecomputeNames.at(static_cast<std::size_t>(o.recompute))}};
}

Json counts_of(const Stats& stats) {
  const auto count = [](const Count& c) { return Json{{"tensors", c.tensors}, {"bytes", c.bytes}}; };
  const auto level = [](const Level& l) {
    return Json{{"now_bytes", l.now_bytes}, {"peak_bytes", l.peak_bytes}, {"capacity_bytes", l.capacity_bytes}};
  };
  Json kept = Json::object();
  for (std::size_t i = 0; i < stats.kept.size(); ++i) {
    kept[std::string(to_string(static_cast<Kept>(i)))] = count(stats.kept[i]);
  }
  return {{"saved", count(stats.saved)},
          {"offloaded", count(stats.offloaded)},
          {"deduplicated", count(stats.deduplicated)},
          {"kept", kept},
          {"dropped", count(stats.dropped)},
          {"fetched", count(stats.fetched)},
          {"recomputed", count(stats.recomputed)},
          {"reused", count(stats.reused)},
          {"stalls", stats.stalls},
          {"stalled_ms", stats.stalled_ms},
          {"pool", level(stats.pool)},
          {"pool_growths", stats.pool_growths},
          {"stash", level(stats.stash)},
          {"window", level(stats.window)}};
}

Json timeline_of(const SavedMemory& saved) {
  Json points = Json::array();
  for (const auto& sample : saved.timeline) {
    points.push_back({{"ms", sample.ms}, {"saved_on_device", sample.saved_on_device}, {"backward", sample.backward}});
  }
  return points;
}

}  // namespace

bool Report::losses_equal() const {
  return std::equal(
      run.losses.begin(), run.losses.end(), plain->losses.begin(), plain->losses.end(),
      [](float a, float b) { return std::bit_cast<std::uint32_t>(a) == std::bit_cast<std::uint32_t>(b); });
}

void write_report(const Report& report, const std::filesystem::path& folder) {
  const auto& plain = report.plain;
  Json json = {{"device", report.run.device},
               {"dtype", report.options.dtype},
               {"deterministic", at::globalContext().deterministicAlgorithms()},
               {"first_step", report.first_step},
               {"steps", report.run.losses.size()},
               {"losses", report.run.losses},
               {"plain_losses", plain ? Json(plain->losses) : Json()},
               {"losses_equal", plain ? Json(report.losses_equal()) : Json()},
               {"ms_per_step", report.run.ms_per_step()},
               {"plain_ms_per_step", plain ? Json(plain->ms_per_step()) : Json()},
               {"peak_saved_bytes_on_device", report.run.saved.peak_bytes},
               {"plain_peak_saved_bytes_on_device", plain ? Json(plain->saved.peak_bytes) : Json()},
               {"peak_device_bytes", report.run.peak_device_bytes},
               {"plain_peak_device_bytes", plain ? Json(plain->peak_device_bytes) : Json()},
               {"peak_resident_bytes", report.run.peak_resident_bytes},
               {"plain_peak_resident_bytes", plain ? Json(plain->peak_resident_bytes) : Json()},
               {"bytes_offloaded_per_step", report.run.bytes_offloaded_per_step()},
               {"text", report.text.string()},
               {"text_bytes", report.text_bytes},
               {"config", config_of(report.options)},
               {"stats", counts_of(report.run.stats)},
               {"timeline", timeline_of(report.run.saved)},
               {"plain_timeline", plain ? timeline_of(plain->saved) : Json()}};
  write_whole_file(folder / kReportFile, json.dump(2) + "\n");
}

}  // namespace ebb

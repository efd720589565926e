#include <algorithm>
#include <cstdio>
#include <functional>

#include "bench/bytes.h"
#include "bench/train/report.h"

namespace ebb {
namespace {

std::string number(const char* format, double value) {
  char out[64];
  std::snprintf(out, sizeof(out), format, value);
  return out;
}

std::string row(const std::string& name, const std::string& left, const std::string& right) {
  char out[160];
  std::snprintf(out, sizeof(out), "  %-30s %14s %14s", name.c_str(), left.c_str(), right.c_str());
  const std::string line = out;
  return line.substr(0, line.find_last_not_of(' ') + 1) + "\n";
}

std::string verdict(const Report& report) {
  const std::size_t steps = report.run.losses.size();
  if (report.losses_equal()) {
    return "losses: all " + std::to_string(steps) + " equal bit for bit\n";
  }
  const auto differ = std::mismatch(report.run.losses.begin(), report.run.losses.end(), report.plain->losses.begin(),
                                    report.plain->losses.end());
  const auto first = differ.first - report.run.losses.begin() + report.first_step + 1;
  return "losses: DIFFERENT from step " + std::to_string(first) + " on\n";
}

}  // namespace

std::string summary(const Report& report) {
  const auto cells = [&](const std::string& name, const std::function<std::string(const RunResult&)>& cell) {
    return row(name, cell(report.run), report.plain ? cell(*report.plain) : "");
  };
  std::string out = row("", report.options.offload ? "with ebb" : "without ebb", report.plain ? "without ebb" : "");
  out += cells("last loss", [](const RunResult& r) { return number("%.4f", r.losses.back()); });
  out += cells("ms per step", [](const RunResult& r) { return number("%.1f", r.ms_per_step()); });
  out += cells("peak saved bytes on the device", [](const RunResult& r) { return format_bytes(r.saved.peak_bytes); });
  out += cells("peak device memory", [](const RunResult& r) { return format_bytes(r.peak_device_bytes); });
  out += cells("peak resident memory", [](const RunResult& r) { return format_bytes(r.peak_resident_bytes); });
  out += cells("offloaded per step", [](const RunResult& r) { return format_bytes(r.bytes_offloaded_per_step()); });
  if (report.options.recompute != Recompute::kNo) {
    out += cells("recomputed per step", [](const RunResult& r) {
      return format_bytes(r.stats.recomputed.bytes / std::max<std::uint64_t>(r.stats.steps, 1));
    });
  }
  out += cells("stalls", [](const RunResult& r) { return std::to_string(r.stats.stalls); });
  if (report.run.stats.kept_for(Kept::kNoRoom).tensors > 0) {
    out += row("kept for want of room", format_bytes(report.run.stats.kept_for(Kept::kNoRoom).bytes), "");
  }
  return report.plain ? out + verdict(report) : out;
}

}  // namespace ebb

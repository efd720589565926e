#include "examples/train/report.h"

#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <map>
#include <optional>
#include <system_error>
#include <vector>

#include <ATen/Context.h>
#include <nlohmann/json.hpp>

#include "examples/common/atomic_file.h"
#include "offload/base/human_bytes.h"

namespace ebb {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

template <typename Value>
std::string word_of(const std::map<std::string, Value>& words, Value value) {
  return std::ranges::find(words, value, [](const auto& word) { return word.second; })->first;
}

Json config_of(const TrainOptions& o) {
  const auto home = [](const std::optional<Home>& h) { return h ? Json(word_of(kHomeWords, *h)) : Json(); };
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
          {"minimum_bytes", o.minimum_bytes.value_or(kLeastSaved)},
          {"recompute", word_of(kRecomputeWords, o.recompute)},
          {"manage", home(o.managed)},
          {"optimizer_home", home(o.optimizer_home)},
          {"managed_bytes", o.managed_bytes ? Json(*o.managed_bytes) : Json()}};
}

Json counts_of(const Stats& stats) {
  const auto count = [](const Count& c) { return Json{{"tensors", c.tensors}, {"bytes", c.bytes}}; };
  const auto level = [](const Level& l) {
    return Json{{"now_bytes", l.now_bytes}, {"peak_bytes", l.peak_bytes}, {"capacity_bytes", l.capacity_bytes}};
  };
  Json kept = Json::object();
  for (std::size_t i = 0; i < stats.kept.size(); ++i) {
    kept[std::string(to_string(static_cast<KeptReason>(i)))] = count(stats.kept[i]);
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
          {"window", level(stats.window)},
          {"managed", count(stats.managed)},
          {"managed_on_device", level(stats.managed_on_device)}};
}

Json timeline_of(const SavedMemory& saved) {
  Json points = Json::array();
  for (const auto& sample : saved.timeline) {
    points.push_back({{"ms", sample.ms}, {"saved_on_device", sample.saved_on_device}, {"backward", sample.backward}});
  }
  return points;
}

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

constexpr const char* kScript = "examples/train/plot_memory.py";

// Beside the program as Bazel lays out its data, in the checkout that ./dev names, or under the current folder.
std::optional<fs::path> find_script() {
  std::error_code ignored;
  std::vector<fs::path> roots = {fs::read_symlink("/proc/self/exe", ignored).string() + ".runfiles/ebb"};
  if (const char* root = std::getenv("EBB_ROOT")) {
    roots.emplace_back(root);
  }
  roots.emplace_back(".");
  for (const auto& root : roots) {
    if (fs::exists(root / kScript, ignored)) {
      return root / kScript;
    }
  }
  return std::nullopt;
}

// Whether the command could be started and ended with 0.
bool succeeds(const std::vector<std::string>& command) {
  std::vector<char*> arguments;
  arguments.reserve(command.size() + 1);
  for (const auto& word : command) {
    arguments.push_back(const_cast<char*>(word.c_str()));
  }
  arguments.push_back(nullptr);
  pid_t child = 0;
  if (posix_spawnp(&child, arguments[0], nullptr, nullptr, arguments.data(), environ) != 0) {
    return false;
  }
  int status = 0;
  return waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0;
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
  write_atomic_file(folder / kReportFile, json.dump(2) + "\n");
}

std::string summary(const Report& report) {
  const auto cells = [&](const std::string& name, const std::function<std::string(const RunResult&)>& cell) {
    return row(name, cell(report.run), report.plain ? cell(*report.plain) : "");
  };
  std::string out = row("", report.options.offload ? "with ebb" : "without ebb", report.plain ? "without ebb" : "");
  out += cells("last loss", [](const RunResult& r) { return number("%.4f", r.losses.back()); });
  out += cells("ms per step", [](const RunResult& r) { return number("%.1f", r.ms_per_step()); });
  out += cells("peak saved bytes on the device", [](const RunResult& r) { return human_bytes(r.saved.peak_bytes); });
  out += cells("peak device memory", [](const RunResult& r) { return human_bytes(r.peak_device_bytes); });
  out += cells("peak resident memory", [](const RunResult& r) { return human_bytes(r.peak_resident_bytes); });
  out += cells("peak at home (RAM or disk)", [](const RunResult& r) { return human_bytes(r.stats.pool.peak_bytes); });
  out += cells("offloaded per step", [](const RunResult& r) { return human_bytes(r.bytes_offloaded_per_step()); });
  if (report.options.recompute != Recompute::kNo) {
    out += cells("recomputed per step", [](const RunResult& r) {
      return human_bytes(r.stats.recomputed.bytes / std::max<std::uint64_t>(r.stats.steps, 1));
    });
  }
  out += cells("stalls", [](const RunResult& r) { return std::to_string(r.stats.stalls); });
  if (report.run.stats.kept_for(KeptReason::kNoRoom).tensors > 0) {
    out += row("kept for want of room", human_bytes(report.run.stats.kept_for(KeptReason::kNoRoom).bytes), "");
  }
  return report.plain ? out + verdict(report) : out;
}

bool draw_picture(const fs::path& folder) {
  const char* python = std::getenv("EBB_PYTHON");
  const auto script = find_script();
  const std::vector<std::string> command = {python != nullptr ? python : "python3", script ? script->string() : kScript,
                                            (folder / "report.json").string(), (folder / "memory.png").string()};
  if (script && succeeds(command)) {
    return true;
  }
  std::string line;
  for (const auto& word : command) {
    line += (line.empty() ? "" : " ") + word;
  }
  std::fprintf(stderr, "train: warning: memory.png was not drawn; with a Python that has matplotlib run: %s\n",
               line.c_str());
  return false;
}

}  // namespace ebb

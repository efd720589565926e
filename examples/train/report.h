#pragma once

#include <cstddef>
#include <filesystem>
#include <optional>
#include <string>

#include "examples/train/options.h"
#include "examples/train/run.h"

namespace ebb {

inline constexpr const char* kReportFile = "report.json";

// All results of a run of the program.
struct Report {
  TrainOptions options;
  std::filesystem::path text;
  std::size_t text_bytes = 0;
  std::int64_t first_step = 0;
  RunResult run;                   // with ebb, unless it was switched off
  std::optional<RunResult> plain;  // without ebb, where a comparison was asked for

  // Whether every loss is equal bit for bit. Only with a comparison.
  [[nodiscard]] bool losses_equal() const;
};

// Writes kReportFile into the folder, which must be there. Throws std::runtime_error that names the file. Sizes are
// bytes, times milliseconds; what was not measured is null. Resident memory is the memory of a run's own process,
// libraries included; without a comparison it is the memory of the whole program so far. `deterministic` is whether
// LibTorch was confined to algorithms that give the same bits in every run. `plain_peak_saved_bytes_on_device` is
// counted as `peak_saved_bytes_on_device` is, by an offloader that keeps everything.
void write_report(const Report& report, const std::filesystem::path& folder);

// The results side by side, as lines for a terminal.
std::string summary(const Report& report);

// Draws FOLDER/memory.png from FOLDER/report.json with plot_memory.py, by the Python of $EBB_PYTHON or else
// python3. A picture that cannot be drawn costs one warning on standard error, with the command to run by hand: the
// numbers are in the JSON. Returns whether the picture was drawn.
bool draw_picture(const std::filesystem::path& folder);

}  // namespace ebb

#pragma once

#include <filesystem>

namespace ebb {

// Draws FOLDER/memory.png from FOLDER/report.json with bench/plot_memory.py, by the Python of $EBB_PYTHON or else
// python3. A picture that cannot be drawn costs one warning on standard error, with the command to run by hand: the
// numbers are in the JSON. Returns whether it was drawn.
bool draw_picture(const std::filesystem::path& folder);

}  // namespace ebb

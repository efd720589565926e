#pragma once

#include <string>
#include <vector>

#include <nlohmann/json.hpp>

namespace ebb {

// Runs this program once more, in a process of its own, with these arguments and "--out FILE", and returns the JSON
// that the process writes there. For settings that hold for a whole process, such as deterministic algorithms. Throws
// std::runtime_error if the process fails.
nlohmann::json run_subprocess(const std::vector<std::string>& arguments);

}  // namespace ebb

#pragma once

#include <string>
#include <vector>

#include <nlohmann/json.hpp>

namespace ebb {

// Runs this program once more, in a process of its own, with these arguments and "--out FILE", and returns the JSON
// that it writes there. For what a process can do in one way only, such as compute deterministically. Throws
// std::runtime_error if that process fails.
nlohmann::json run_subprocess(const std::vector<std::string>& arguments);

}  // namespace ebb

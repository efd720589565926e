#pragma once

#include <map>
#include <string>

namespace ebb {

// What the probe does, by the names of its modes.
using Modes = std::map<std::string, void (*)()>;

extern const Modes kEngineModes;
extern const Modes kExitModes;
extern const Modes kForkModes;
extern const Modes kMemoryModes;
extern const Modes kWarningModes;

}  // namespace ebb

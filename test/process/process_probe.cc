// A program that test/offload/autograd/process_test.cc starts, because what it shows concerns a whole process: exit and
// fork at awkward moments, and its memory. `process_probe MODE` prints what happened, one line each, and exits 0 unless
// something unexpected was thrown (1), or was not (its line says so). An alarm ends it, and each child, that hangs.

#include <unistd.h>

#include <exception>
#include <iostream>

#include <ATen/Parallel.h>

#include "test/process/modes.h"
#include "test/process/world.h"

namespace {

constexpr unsigned kProbeSeconds = 20;

}  // namespace

int main(int argc, char** argv) {
  alarm(kProbeSeconds);
  at::set_num_threads(1);  // libgomp's threads do not survive fork either, and nothing here needs them
  ebb::Modes modes = ebb::kExitModes;
  modes.insert(ebb::kEngineModes.begin(), ebb::kEngineModes.end());
  modes.insert(ebb::kForkModes.begin(), ebb::kForkModes.end());
  modes.insert(ebb::kMemoryModes.begin(), ebb::kMemoryModes.end());
  modes.insert(ebb::kWarningModes.begin(), ebb::kWarningModes.end());
  const auto mode = modes.find(argc == 2 ? argv[1] : "");
  if (mode == modes.end()) {
    std::cerr << "usage: process_probe MODE\n";
    return 2;
  }
  try {
    mode->second();
    return 0;
  } catch (const std::exception& error) {
    ebb::say(error.what());
    return 1;
  }
}

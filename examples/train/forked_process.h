#pragma once

#include <cstdint>
#include <functional>
#include <string>

namespace ebb {

// What a process gave and what it took.
struct ProcessResult {
  std::string answer;
  std::uint64_t peak_resident_bytes = 0;
};

// Runs `work` in a forked child and returns what `work` returned. The peak is the child's ru_maxrss, as its parent is
// told: the most pages in RAM at a time, those that it has from this process and from libraries included. `work` may
// use CUDA if this process has not yet, and the child ends when this process does. Throws std::runtime_error with the
// message of what `work` threw, or with the signal that ended the child. To be called by the only thread.
ProcessResult in_forked_process(const std::function<std::string()>& work);

// The same peak of this process so far.
std::uint64_t peak_resident_bytes();

}  // namespace ebb

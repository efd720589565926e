#pragma once

#include <cstdint>
#include <functional>
#include <string>

namespace ebb {

// The result of a process, and the memory that it took.
struct ProcessResult {
  std::string answer;
  std::uint64_t peak_resident_bytes = 0;
};

// Runs `work` in a forked child and returns what `work` returned. The peak is the child's ru_maxrss, as the
// system tells its parent: the most pages in RAM at a time, pages of this process and of libraries included. `work` may
// use CUDA if this process has not yet, and the child ends when this process does. Throws std::runtime_error with the
// message of what `work` threw, or with the signal that ended the child. To be called while this process
// has one thread.
ProcessResult in_forked_process(const std::function<std::string()>& work);

// The peak of this process so far, counted as ProcessResult's.
std::uint64_t peak_resident_bytes();

}  // namespace ebb

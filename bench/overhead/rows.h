#pragma once

#include <chrono>
#include <string>

#include <c10/core/Device.h>

namespace ebb {

// The parts of the overhead benchmark, each in a file of its own. A row that needs a GPU is left out where there is
// none, with a line on stderr that names it.
void register_saves();        // saves passed through, moved and restored
void register_chain();        // a chain of small operations, as saves.py times in Python
void register_copies();       // what moving takes without ebb, and with ebb's tier alone
void register_live_graphs();  // whether the cost of a save grows with what is alive
void register_no_room();      // saves that were to move and find no room
void register_managed();      // whether the cost of a use grows with what is managed

// The GPU, if there is one.
[[nodiscard]] bool has_gpu();
inline const c10::Device kGpu{c10::kCUDA, 0};

// Says on stderr that a row is left out.
void skip_without_gpu(const std::string& row);

// A time that is read where it is wanted, and else 0.
class Stopwatch {
 public:
  explicit Stopwatch(bool runs = true) : runs_(runs) {}
  [[nodiscard]] double seconds() const {
    return runs_ ? std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count() : 0;
  }

 private:
  const bool runs_;
  const std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

inline constexpr double kNanoseconds = 1e9;  // a second's

}  // namespace ebb

#pragma once

#include <cstdint>
#include <string>

namespace ebb {

// Shows how a run gets on, on standard output: one live line on a terminal, else plain lines, at most about fifty.
class Progress {
 public:
  struct Step {
    std::int64_t step = 0;  // steps done
    float loss = 0;
    double ms = 0;
    std::uint64_t device_peak_bytes = 0;  // the most memory in use so far
    std::uint64_t offloaded_bytes = 0;    // since the run began, as are the stalls
    std::uint64_t stalls = 0;
  };

  // `title` heads the run; a step has `tokens` tokens.
  Progress(const std::string& title, std::int64_t steps, std::int64_t tokens);

  // Ends the live line.
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  void show(const Step& step);

 private:
  std::int64_t steps_;
  std::int64_t tokens_;
  bool live_;
  bool open_ = false;  // the live line is not ended
};

}  // namespace ebb

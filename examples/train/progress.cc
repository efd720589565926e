#include "examples/train/progress.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>

#include "offload/base/human_bytes.h"

namespace ebb {
namespace {

constexpr std::int64_t kMostPlainLines = 50;

}  // namespace

Progress::Progress(const std::string& title, std::int64_t steps, std::int64_t tokens)
    : steps_(steps), tokens_(tokens), live_(isatty(STDOUT_FILENO) != 0) {
  std::printf("%s\n", title.c_str());
  std::fflush(stdout);
}

Progress::~Progress() {
  if (open_) {
    std::printf("\n");
    std::fflush(stdout);
  }
}

void Progress::show(const Step& step) {
  const std::int64_t every = std::max<std::int64_t>(1, steps_ / kMostPlainLines);
  if (!live_ && step.step % every != 0 && step.step != steps_) {
    return;
  }
  constexpr double kMsPerSecond = 1000.0;
  std::printf("%sstep %lld/%lld  loss %.4f  %.0f tokens/s  device peak %s  offloaded %s  stalls %llu%s",
              live_ ? "\r\033[K" : "", static_cast<long long>(step.step), static_cast<long long>(steps_), step.loss,
              static_cast<double>(tokens_) * kMsPerSecond / step.ms, human_bytes(step.device_peak_bytes).c_str(),
              human_bytes(step.offloaded_bytes).c_str(), static_cast<unsigned long long>(step.stalls),
              live_ ? "" : "\n");
  std::fflush(stdout);
  open_ = live_;
}

}  // namespace ebb

#pragma once

#include <string>

#include "test/train/program.h"

namespace ebb {

// The training program on a text and a model so small that a run takes about the time LibTorch takes to load.
class TinyRun {
 public:
  TinyRun();

  // Runs it with these flags; where they do not set a size or the text, the tiny one holds.
  [[nodiscard]] Outcome operator()(const std::string& flags, const std::string& before = "") const;

  // A file of this test's folder, for flags and for reading back.
  [[nodiscard]] std::string file(const std::string& name) const { return folder_.file(name).string(); }

 private:
  TempFolder folder_;
};

}  // namespace ebb

#pragma once

#include <cstddef>
#include <filesystem>

namespace ebb {

// Writes a file that appears whole or not at all: into FILE.partial beside it, then flushed to the disk, then renamed
// over FILE. What FILE held before stays until then, whatever goes wrong, and a run that is killed leaves at most
// FILE.partial, which the next one overwrites.
class WholeFile {
 public:
  // Throws std::runtime_error that names the file and the reason, as does commit.
  explicit WholeFile(std::filesystem::path file);

  // Removes the partial file unless it was committed.
  ~WholeFile();
  WholeFile(const WholeFile&) = delete;
  WholeFile& operator=(const WholeFile&) = delete;

  // Never throws, because its caller is LibTorch's C archive writer: a failure is kept for commit to report.
  void append(const void* data, std::size_t bytes) noexcept;

  void commit();

 private:
  std::filesystem::path file_;
  std::filesystem::path partial_;
  int descriptor_ = -1;
  int error_ = 0;  // errno of the first write that failed
};

}  // namespace ebb

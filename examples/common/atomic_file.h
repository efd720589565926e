#pragma once

#include <cstddef>
#include <filesystem>
#include <string_view>

namespace ebb {

// Writes a file that appears whole or not at all: into FILE.partial beside it, then flushed to the disk, then renamed
// over FILE. What FILE held before stays until then, whatever goes wrong, and a run that is killed leaves at most
// FILE.partial, which the next run overwrites.
class AtomicFile {
 public:
  // Throws std::runtime_error that names the file and the reason, as does commit.
  explicit AtomicFile(std::filesystem::path file);

  // Removes the partial file unless it was committed.
  ~AtomicFile();
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;

  // Never throws: a failure is kept for commit to report.
  void append(const void* data, std::size_t bytes) noexcept;

  void commit();

 private:
  std::filesystem::path file_;
  std::filesystem::path partial_;
  int descriptor_ = -1;
  int error_ = 0;  // errno of the first write that failed
};

// Writes `text` as a file that appears whole or not at all.
void write_atomic_file(const std::filesystem::path& file, std::string_view text);

// For a file that is written much later: throws now the exceptions of writing the file, as far as they can be known.
// Leaves the file as it is.
void require_writable(const std::filesystem::path& file);

// Makes the folder, and the folders above it, where they do not exist. Throws std::runtime_error that names the folder.
void make_folder(const std::filesystem::path& folder);

}  // namespace ebb

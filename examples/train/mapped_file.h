#pragma once

#include <cstddef>
#include <filesystem>
#include <span>

namespace ebb {

// A file's bytes, to be read in place. The file must not be cut short while it is mapped; the mapping of a file that
// AtomicFile replaces stays whole.
class MappedFile {
 public:
  // Throws std::system_error with the system's reason if the file cannot be read, or is not a regular file.
  explicit MappedFile(const std::filesystem::path& file);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  [[nodiscard]] std::span<const std::byte> bytes() const { return bytes_; }

 private:
  std::span<const std::byte> bytes_;
};

}  // namespace ebb

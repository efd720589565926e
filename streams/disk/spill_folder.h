#pragma once

#include <unistd.h>

#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <utility>

namespace ebb {

// Owns an open file or folder.
class FileDescriptor {
 public:
  explicit FileDescriptor(int fd) : fd_(fd) {}
  FileDescriptor(FileDescriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  FileDescriptor(const FileDescriptor&) = delete;
  FileDescriptor& operator=(const FileDescriptor&) = delete;
  FileDescriptor& operator=(FileDescriptor&&) = delete;
  ~FileDescriptor() {
    if (fd_ >= 0) {
      ::close(fd_);
    }
  }

  [[nodiscard]] int get() const { return fd_; }

 private:
  int fd_;  // -1 when moved from
};

// The folder of a spill file, opened once and checked: files are made in the folder that was checked, whatever its path
// leads to by then.
//
// Accepted is a folder in which nobody but root can replace what this process makes: it belongs to this process's user
// or to root, and either nobody else may write to it or it is sticky, as /var/tmp is. The last part of the path may be
// a symbolic link; the folder that the link leads to is checked.
//
// Errors: std::system_error for what the system refuses, std::invalid_argument for a folder that is not accepted. Each
// names the folder.
//
// Threads: every member from any thread.
class SpillFolder {
 public:
  explicit SpillFolder(std::filesystem::path path);

  [[nodiscard]] const std::filesystem::path& path() const { return path_; }

  // For fstat and its like: opened with O_PATH.
  [[nodiscard]] int fd() const { return fd_.get(); }

  // A new, empty file without a name, for its owner only, open for reading and writing, and not inherited by another
  // program. The system frees it when it is closed, however the process ends.
  [[nodiscard]] FileDescriptor make_file() const;

  // The two ways to make such a file. The first file never has a name; nullopt where the file system or the kernel does
  // not have O_TMPFILE. The second way works everywhere, but the file has a name for a moment: a process that is killed
  // just then leaves an empty file. `next_name` is called again when a name is taken, a few times.
  [[nodiscard]] std::optional<FileDescriptor> make_unnamed_file() const;
  [[nodiscard]] FileDescriptor make_unlinked_file(const std::function<std::string()>& next_name) const;

 private:
  [[noreturn]] void refuse_file(int error) const;

  const std::filesystem::path path_;
  const FileDescriptor fd_;
};

}  // namespace ebb

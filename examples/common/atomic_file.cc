#include "examples/common/atomic_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <string>
#include <system_error>
#include <utility>

namespace ebb {
namespace {

[[noreturn]] void fail(const std::filesystem::path& file, int error) {
  throw std::runtime_error("cannot write " + file.string() + ": " + std::strerror(error));
}

// A rename is on the disk only when its folder is.
void flush_folder(const std::filesystem::path& file) {
  const auto folder = file.has_parent_path() ? file.parent_path() : std::filesystem::path(".");
  const int descriptor = open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (descriptor < 0) {
    fail(folder, errno);
  }
  const int error = fsync(descriptor) == 0 ? 0 : errno;
  close(descriptor);
  if (error != 0) {
    fail(folder, error);
  }
}

}  // namespace

AtomicFile::AtomicFile(std::filesystem::path file) : file_(std::move(file)), partial_(file_.string() + ".partial") {
  constexpr int kMode = 0644;
  descriptor_ = open(partial_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, kMode);
  if (descriptor_ < 0) {
    fail(file_, errno);
  }
}

AtomicFile::~AtomicFile() {
  if (descriptor_ >= 0) {
    close(descriptor_);
    unlink(partial_.c_str());
  }
}

void AtomicFile::append(const void* data, std::size_t bytes) noexcept {
  const auto* next = static_cast<const char*>(data);
  while (bytes > 0 && error_ == 0) {
    const ssize_t written = write(descriptor_, next, bytes);
    if (written > 0) {
      next += written;
      bytes -= static_cast<std::size_t>(written);
    } else if (written == 0) {
      error_ = ENOSPC;
    } else if (errno != EINTR) {
      error_ = errno;
    }
  }
}

void AtomicFile::commit() {
  if (error_ == 0 && fsync(descriptor_) != 0) {
    error_ = errno;
  }
  if (error_ != 0) {
    fail(file_, error_);
  }
  if (rename(partial_.c_str(), file_.c_str()) != 0) {
    fail(file_, errno);
  }
  close(std::exchange(descriptor_, -1));
  flush_folder(file_);
}

void write_atomic_file(const std::filesystem::path& file, std::string_view text) {
  AtomicFile out(file);
  out.append(text.data(), text.size());
  out.commit();
}

void require_writable(const std::filesystem::path& file) {
  if (std::filesystem::is_directory(file)) {
    fail(file, EISDIR);
  }
  const AtomicFile not_committed(file);
}

void make_folder(const std::filesystem::path& folder) {
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  if (error) {
    throw std::runtime_error("cannot make the folder " + folder.string() + ": " + error.message());
  }
}

}  // namespace ebb

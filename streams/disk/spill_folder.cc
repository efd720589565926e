#include "streams/disk/spill_folder.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <array>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <random>
#include <stdexcept>
#include <system_error>

#include "streams/base/fault_point.h"

namespace ebb {

namespace {

constexpr mode_t kOwnerOnly = 0600;
constexpr int kTries = 8;  // of random names: even one name that is taken is next to impossible

int open_folder(const std::filesystem::path& path) {
  if (fails(FaultPoint::kOpen)) {
    errno = EMFILE;
    return -1;
  }
  // O_PATH: a folder that may be written to need not be readable.
  return ::open(path.c_str(), O_PATH | O_DIRECTORY | O_CLOEXEC);
}

std::string octal(mode_t mode) {
  std::array<char, 8> text{};
  std::snprintf(text.data(), text.size(), "%04o", static_cast<unsigned>(mode & 07777));
  return text.data();
}

std::string random_name() {
  std::random_device random;
  const std::uint64_t number = (std::uint64_t{random()} << 32) | random();
  return "ebb-spill-" + std::to_string(number);
}

}  // namespace

SpillFolder::SpillFolder(std::filesystem::path path) : path_(std::move(path)), fd_(open_folder(path_)) {
  const auto refuse = [this](int error) {
    throw std::system_error(error, std::generic_category(), "cannot use the spill folder \"" + path_.string() + "\"");
  };
  struct stat info {};
  if (fd() < 0 || ::fstat(fd(), &info) != 0) {
    refuse(errno);
  }
  const uid_t user = ::geteuid();
  const bool of_this_user = info.st_uid == user || info.st_uid == 0;
  const bool replaceable = (info.st_mode & (S_IWGRP | S_IWOTH)) != 0 && (info.st_mode & S_ISVTX) == 0;
  if (!of_this_user || replaceable) {
    throw std::invalid_argument("cannot use the spill folder \"" + path_.string() + "\": it belongs to user " +
                                std::to_string(info.st_uid) + " and has mode " + octal(info.st_mode) +
                                "; it must belong to this user (" + std::to_string(user) +
                                ") or to root, and be writable by its owner only or be sticky");
  }
  if (::faccessat(fd(), ".", W_OK | X_OK, AT_EACCESS) != 0) {
    refuse(errno);
  }
}

void SpillFolder::refuse_file(int error) const {
  throw std::system_error(error, std::generic_category(), "cannot create a spill file in " + path_.string());
}

FileDescriptor SpillFolder::make_file() const {
  std::optional<FileDescriptor> unnamed = make_unnamed_file();
  return unnamed.has_value() ? std::move(*unnamed) : make_unlinked_file(random_name);
}

std::optional<FileDescriptor> SpillFolder::make_unnamed_file() const {
  if (fails(FaultPoint::kOpen)) {
    refuse_file(EMFILE);
  }
  // O_EXCL: the file can never be given a name later either.
  const int fd = ::openat(this->fd(), ".", O_TMPFILE | O_EXCL | O_RDWR | O_CLOEXEC, kOwnerOnly);
  if (fd >= 0) {
    return FileDescriptor(fd);
  }
  if (errno == EOPNOTSUPP || errno == EISDIR) {  // the answers of a file system and of a kernel without O_TMPFILE
    return std::nullopt;
  }
  refuse_file(errno);
}

FileDescriptor SpillFolder::make_unlinked_file(const std::function<std::string()>& next_name) const {
  for (int i = 0; i < kTries; ++i) {
    const std::string name = next_name();
    const int fd = ::openat(this->fd(), name.c_str(), O_CREAT | O_EXCL | O_NOFOLLOW | O_RDWR | O_CLOEXEC, kOwnerOnly);
    if (fd >= 0) {
      FileDescriptor file(fd);
      if (::unlinkat(this->fd(), name.c_str(), 0) != 0) {
        refuse_file(errno);
      }
      return file;
    }
    if (errno != EEXIST) {
      refuse_file(errno);
    }
  }
  refuse_file(EEXIST);
}

}  // namespace ebb

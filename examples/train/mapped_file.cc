#include "examples/train/mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>

namespace ebb {
namespace {

[[noreturn]] void fail(int error) { throw std::system_error(error, std::generic_category()); }

// The descriptor is not needed once the file is mapped.
struct Descriptor {
  int number;
  ~Descriptor() { close(number); }
};

}  // namespace

MappedFile::MappedFile(const std::filesystem::path& file) {
  const int number = open(file.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);  // or a pipe would hold the program up
  if (number < 0) {
    fail(errno);
  }
  const Descriptor descriptor{number};
  struct stat facts = {};
  if (fstat(number, &facts) != 0) {
    fail(errno);
  }
  if (!S_ISREG(facts.st_mode)) {
    fail(S_ISDIR(facts.st_mode) ? EISDIR : EINVAL);
  }
  if (facts.st_size == 0) {  // which mmap refuses
    return;
  }
  const auto size = static_cast<std::size_t>(facts.st_size);
  void* const data = mmap(nullptr, size, PROT_READ, MAP_PRIVATE, number, 0);
  if (data == MAP_FAILED) {
    fail(errno);
  }
  bytes_ = {static_cast<const std::byte*>(data), size};
}

MappedFile::~MappedFile() {
  if (!bytes_.empty()) {
    munmap(const_cast<std::byte*>(bytes_.data()), bytes_.size());
  }
}

}  // namespace ebb

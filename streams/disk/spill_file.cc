#include "streams/disk/spill_file.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <cerrno>
#include <limits>
#include <string>
#include <system_error>
#include <utility>

#include "streams/base/aligned_memory.h"
#include "streams/base/fault_point.h"
#include "streams/base/system_memory.h"

namespace ebb {

namespace {

[[noreturn]] void throw_errno(int error, const std::string& what) {
  throw std::system_error(error, std::generic_category(), what);
}

// Switches the file to direct I/O and returns the alignment that it asks of memory; 1 when it stays buffered.
std::size_t make_direct(int fd) {
#ifdef STATX_DIOALIGN
  // Many disks accept far less than a page, which saves most of the copies through bounce buffers.
  struct statx info {};
  if (::statx(fd, "", AT_EMPTY_PATH, STATX_DIOALIGN, &info) == 0 && (info.stx_mask & STATX_DIOALIGN) != 0) {
    const std::size_t in_memory = info.stx_dio_mem_align;
    const std::size_t in_file = info.stx_dio_offset_align;
    if (in_memory == 0 || in_memory > kPageBytes || in_file == 0 || in_file > kPageBytes) {
      return 1;
    }
    const std::size_t alignment = in_memory == 1 ? 2 : in_memory;  // 1 would mean buffered
    return ::fcntl(fd, F_SETFL, O_DIRECT) == 0 ? alignment : 1;
  }
#endif
  // The flag is set on the open file, not at open: some file systems create the file and then refuse the flag.
  return ::fcntl(fd, F_SETFL, O_DIRECT) == 0 ? kPageBytes : 1;
}

int reserve(int fd, std::uint64_t offset, std::uint64_t bytes) {
  if (fails(FaultPoint::kFallocate)) {
    return ENOSPC;
  }
  rlimit limit{};
  // The limit is checked first, because beyond it the kernel sends the signal SIGXFSZ, which ends the process.
  if (::getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY && offset + bytes > limit.rlim_cur) {
    return EFBIG;
  }
  int result = 0;
  do {
    result = ::fallocate(fd, 0, static_cast<off_t>(offset), static_cast<off_t>(bytes));
  } while (result != 0 && errno == EINTR);
  if (result != 0 && (errno == EOPNOTSUPP || errno == ENOSYS)) {
    result = ::ftruncate(fd, static_cast<off_t>(offset + bytes));
  }
  return result == 0 ? 0 : errno;
}

// Whether the file's bytes are the machine's memory: a memfd's, and those of a folder on tmpfs.
bool lies_in_memory(int fd) {
  struct statfs info {};
  return ::fstatfs(fd, &info) == 0 && info.f_type == TMPFS_MAGIC;
}

}  // namespace

SpillFile::SpillFile(std::filesystem::path folder, FileDescriptor file)
    : folder_(std::move(folder)),
      fd_(std::move(file)),
      is_memory_(lies_in_memory(fd_.get())),
      memory_alignment_(make_direct(fd_.get())) {}

std::unique_ptr<SpillFile> SpillFile::in_memory() {
  FileDescriptor file(::memfd_create("ebb", MFD_CLOEXEC));
  if (file.get() < 0) {
    throw_errno(errno, "cannot make a spill file in memory");
  }
  return std::unique_ptr<SpillFile>(new SpillFile(std::filesystem::path("memory"), std::move(file)));
}

std::optional<std::uint64_t> SpillFile::grow(std::size_t bytes) {
  if (bytes > static_cast<std::uint64_t>(std::numeric_limits<off_t>::max()) - kPageBytes - size_bytes_) {
    return std::nullopt;
  }
  const std::size_t whole_pages = round_up_to_page(bytes);
  if (is_memory_ && !leaves_a_reserve(whole_pages)) {
    return std::nullopt;
  }
  const int error = reserve(fd(), size_bytes_, whole_pages);
  if (error == 0) {
    return std::exchange(size_bytes_, size_bytes_ + whole_pages);
  }
  // A reservation that failed half-way may keep blocks: they go back, because others need the space on a full disk. If
  // the truncation fails, too, nothing is left to do; the next grow takes the same place in the file.
  [[maybe_unused]] const int ignored = ::ftruncate(fd(), static_cast<off_t>(size_bytes_));
  if (error == ENOSPC || error == EDQUOT || error == EFBIG) {
    return std::nullopt;
  }
  throw_errno(error, "cannot grow the spill file in " + folder_.string() + " from " + std::to_string(size_bytes_) +
                         " to " + std::to_string(size_bytes_ + whole_pages) + " bytes");
}

}  // namespace ebb

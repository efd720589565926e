#include "streams/disk/spill_checksums.h"

#include <iterator>

namespace ebb {

void SpillChecksums::forget(std::uint64_t offset, std::size_t bytes) {
  const MutexLock lock(mutex_);
  auto first = pieces_.lower_bound(offset);
  if (first != pieces_.begin()) {
    const auto before = std::prev(first);
    first = before->first + before->second.bytes > offset ? before : first;
  }
  pieces_.erase(first, pieces_.lower_bound(offset + bytes));
}

void SpillChecksums::add(std::uint64_t offset, std::size_t bytes, std::uint64_t checksum) {
  const MutexLock lock(mutex_);
  pieces_.insert_or_assign(offset, Piece{bytes, checksum});
}

std::optional<std::uint64_t> SpillChecksums::find(std::uint64_t offset, std::size_t bytes) const {
  const MutexLock lock(mutex_);
  const auto piece = pieces_.find(offset);
  return piece != pieces_.end() && piece->second.bytes == bytes ? std::optional(piece->second.checksum) : std::nullopt;
}

std::size_t SpillChecksums::size() const {
  const MutexLock lock(mutex_);
  return pieces_.size();
}

}  // namespace ebb

#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>

#include "streams/base/mutex.h"

namespace ebb {

// The checksums that the pieces of a spill file must have, kept in RAM. They grow with the file and not with its use:
// pieces never overlap, because writing a piece forgets the pieces that it touches.
//
// Threads: every member from any thread. The callers see to it that no two transfers of the same bytes are under way at
// once (the rules of `after`).
class SpillChecksums {
 public:
  // Says that a piece is about to be written: from now on nothing is known of these bytes.
  void start_write(std::uint64_t offset, std::size_t bytes);

  // Says that the piece that was started at `offset` is written.
  void finish_write(std::uint64_t offset, std::uint64_t checksum) noexcept;

  // nullopt unless exactly this piece was written last, and wholly.
  [[nodiscard]] std::optional<std::uint64_t> find(std::uint64_t offset, std::size_t bytes) const;

  // How many pieces are known.
  [[nodiscard]] std::size_t size() const;

 private:
  struct Piece {
    std::size_t bytes;
    std::optional<std::uint64_t> checksum;  // nullopt: being written, or the write failed
  };

  mutable Mutex mutex_;
  std::map<std::uint64_t, Piece> pieces_ EBB_GUARDED_BY(mutex_);  // by offset, disjoint
};

}  // namespace ebb

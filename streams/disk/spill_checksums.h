#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>

#include "streams/base/mutex.h"

namespace ebb {

// The checksums that the pieces of a spill file must have, kept in RAM. They grow with the file and not with its use:
// pieces never overlap, because whoever writes a piece has the pieces that it touches forgotten first.
//
// Threads: every member from any thread. The callers see to it that no two transfers of the same bytes are under way at
// once (the rules of `after`).
class SpillChecksums {
 public:
  // Says that these bytes are about to be written: from now on nothing is known of any piece that they touch.
  void forget(std::uint64_t offset, std::size_t bytes);

  // Says that this piece, which was forgotten before, is written.
  void add(std::uint64_t offset, std::size_t bytes, std::uint64_t checksum);

  // nullopt unless exactly this piece was written last, and wholly.
  [[nodiscard]] std::optional<std::uint64_t> find(std::uint64_t offset, std::size_t bytes) const;

  // How many pieces are known.
  [[nodiscard]] std::size_t size() const;

 private:
  struct Piece {
    std::size_t bytes;
    std::uint64_t checksum;
  };

  mutable Mutex mutex_;
  std::map<std::uint64_t, Piece> pieces_ EBB_GUARDED_BY(mutex_);  // by offset, disjoint
};

}  // namespace ebb

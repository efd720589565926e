#pragma once

#include <stdexcept>

namespace ebb {

// The spill file does not hold what was written to it: somebody changed or cut it, or the disk lost a write. The text
// names the bytes, the offset and the folder.
class SpillCorrupted : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

}  // namespace ebb

#pragma once

#include <cstdint>
#include <functional>
#include <optional>

namespace ebb {

struct Largest {
  std::int64_t fitting = 0;                           // 0: not even 1 fits
  std::optional<std::int64_t> failed = std::nullopt;  // the smallest number seen not to fit; none where `most` fits
  int tries = 0;
};

// The largest number from 1 to `most` that fits, if all smaller ones do, to within `resolution` of itself (0: exactly).
// Tries are dear, so the search begins at `guess` and doubles its stride away from there until it has a number that
// fits and a number that does not, and then halves the range between them.
[[nodiscard]] Largest find_largest(std::int64_t guess, std::int64_t most, double resolution,
                                   const std::function<bool(std::int64_t)>& fits);

}  // namespace ebb

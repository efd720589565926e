#include "bench/fits/search.h"

#include <algorithm>

namespace ebb {

Largest find_largest(std::int64_t guess, std::int64_t most, double resolution,
                     const std::function<bool(std::int64_t)>& fits) {
  Largest result;
  const auto width = [&](std::int64_t size) {
    return std::max<std::int64_t>(1, static_cast<std::int64_t>(resolution * static_cast<double>(size)));
  };
  const auto end = [&] { return result.failed.value_or(most + 1); };
  std::int64_t next = std::clamp<std::int64_t>(guess, 1, most);
  std::int64_t stride = width(next);
  while (end() - result.fitting > (result.failed ? width(result.fitting) : 1)) {
    ++result.tries;
    if (fits(next)) {
      result.fitting = next;
    } else {
      result.failed = next;
    }
    const bool bracketed = result.fitting > 0 && result.failed;
    next =
        bracketed ? result.fitting + (*result.failed - result.fitting) / 2 : next + (result.failed ? -stride : stride);
    next = std::clamp(next, result.fitting + 1, std::max(end() - 1, result.fitting + 1));
    stride *= 2;
  }
  return result;
}

}  // namespace ebb

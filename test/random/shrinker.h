#pragma once

#include <cstddef>
#include <functional>

#include "test/random/check.h"

namespace ebb::graphs {

// Makes a failing case smaller while `fails` says that it still fails: fewer threads and lines, plainer settings. Where
// a line goes, those that used its result use its first operand instead. Ends when nothing more can go, or after
// `most_runs` calls of `fails`.
[[nodiscard]] Case shrink(Case failing, const std::function<bool(const Case&)>& fails, std::size_t most_runs = 1500);

}  // namespace ebb::graphs

// Reads which wait a test leaves out: Note [Waits that can be taken away].

#include <algorithm>
#include <cstdio>
#include <cstdlib>

#include "test/checked/wait_points.h"

namespace ebb {
namespace {

// The wait named by the environment variable EBB_WITHOUT_WAIT; kCaller for none.
WaitPoint read_left_out() noexcept {
  const char* const name = std::getenv("EBB_WITHOUT_WAIT");
  if (name == nullptr) {
    return WaitPoint::kCaller;
  }
  const auto* const entry = std::ranges::find(kWaitPoints, std::string_view(name), &WaitPointName::name);
  if (entry == kWaitPoints.end()) {
    std::fprintf(stderr, "EBB_WITHOUT_WAIT=%s names no wait of test/checked/wait_points.h\n", name);
    std::_Exit(2);
  }
  return entry->point;
}

}  // namespace

bool in_force(WaitPoint point) noexcept {
  static const WaitPoint left_out = read_left_out();
  return point == WaitPoint::kCaller || point != left_out;
}

}  // namespace ebb

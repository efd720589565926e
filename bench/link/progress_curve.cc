#include "bench/link/progress_curve.h"

#include <algorithm>
#include <stdexcept>

namespace ebb {
namespace {

constexpr double kBytesPerMsInGbPerS = 1e6;

double gb_per_s(double bytes, double ms) { return bytes / ms / kBytesPerMsInGbPerS; }

// `ms` within the curve.
double bytes_at(const ProgressCurve& curve, double ms) {
  const auto after =
      std::lower_bound(curve.begin(), curve.end(), ms, [](const Progress& point, double at) { return point.ms < at; });
  if (after == curve.begin()) {
    return curve.front().bytes;
  }
  const Progress& before = *(after - 1);
  return before.bytes + (after->bytes - before.bytes) * (ms - before.ms) / (after->ms - before.ms);
}

double rate_between(const ProgressCurve& curve, double from_ms, double to_ms) {
  const auto after = std::upper_bound(curve.begin(), curve.end(), to_ms,
                                      [](double at, const Progress& point) { return at < point.ms; });
  const double last_ms = after == curve.begin() ? from_ms : (after - 1)->ms;
  const double end_ms = last_ms > from_ms ? last_ms : to_ms;
  return gb_per_s(bytes_at(curve, end_ms) - bytes_at(curve, from_ms), end_ms - from_ms);
}

}  // namespace

double rate_gb_per_s(const ProgressCurve& curve) {
  return gb_per_s(curve.back().bytes - curve.front().bytes, curve.back().ms - curve.front().ms);
}

std::pair<double, double> rates_together(const ProgressCurve& a, const ProgressCurve& b) {
  const double from_ms = std::max(a.front().ms, b.front().ms);
  const double to_ms = std::min(a.back().ms, b.back().ms);
  if (from_ms >= to_ms) {
    throw std::runtime_error("the copies of the two directions never ran at the same time");
  }
  return {rate_between(a, from_ms, to_ms), rate_between(b, from_ms, to_ms)};
}

}  // namespace ebb

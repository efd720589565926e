#include "policy/resized_step.h"

#include <algorithm>
#include <cmath>
#include <cstddef>

namespace ebb {

bool Growth::is_known() const {
  const auto [least, most] = std::minmax(one_, other_);
  return least > 0 && most - least >= most / 10 && asked_ >= least / 2 && asked_ <= most + most / 4;
}

bool Growth::is_nearer_to_one() const {
  const auto distance = [&](std::uint64_t from) {
    return std::abs(std::log(static_cast<double>(asked_) / static_cast<double>(from)));
  };
  return distance(one_) <= distance(other_);
}

std::uint64_t Growth::bytes(std::uint64_t in_one, std::uint64_t in_other) const {
  if (in_one == in_other) {
    return in_one;
  }
  if (in_one == 0 || in_other == 0) {
    const std::uint64_t size = in_one == 0 ? other_ : one_;
    return static_cast<std::uint64_t>(static_cast<double>(in_one + in_other) * static_cast<double>(asked_) /
                                      static_cast<double>(size));
  }
  // Of a long double each of these numbers has all its bits.
  const auto one = static_cast<long double>(one_);
  const auto other = static_cast<long double>(other_);
  const auto asked = static_cast<long double>(asked_);
  const auto from = static_cast<long double>(in_one);
  const auto to = static_cast<long double>(in_other);
  const long double squares = from / (one * one) * other * other;  // what `in_other` is, if it grows with the square
  const bool is_square = std::abs(squares - to) < 0.5L;
  const long double grown =
      is_square ? to / (other * other) * asked * asked : from + (to - from) * ((asked - one) / (other - one));
  return grown <= 0 ? 0 : static_cast<std::uint64_t>(std::llround(grown));
}

std::uint64_t Growth::other_bytes(std::uint64_t in_one, std::uint64_t in_other) const {
  const Growth no_less(one_, other_, std::max(asked_, std::min(one_, other_)));
  return in_one == 0 || in_other == 0 ? std::max(in_one, in_other) : no_less.bytes(in_one, in_other);
}

double Growth::ms(double in_one, double in_other) const {
  const auto one = static_cast<double>(one_);
  const auto other = static_cast<double>(other_);
  const auto asked = static_cast<double>(asked_);
  const double in_proportion = is_nearer_to_one() ? in_one * asked / one : in_other * asked / other;
  const double on_line = in_one + (in_other - in_one) * (asked - one) / (other - one);
  return std::max(on_line, in_proportion / 2);  // a time, whatever the noise
}

StepRecord resized(const StepRecord& one, const StepRecord& other, const Growth& growth) {
  const StepRecord& nearest = growth.is_nearer_to_one() ? one : other;
  StepRecord record = slowed(nearest, growth.ms(one.end_ms, other.end_ms) / nearest.end_ms, 0);
  for (std::size_t i = 0; i < record.storages.size(); ++i) {
    const StorageRecord& in_one = one.storages[i];
    const StorageRecord& in_other = other.storages[i];
    StorageRecord& storage = record.storages[i];
    storage.bytes = growth.bytes(in_one.bytes, in_other.bytes);
    storage.other_bytes = growth.other_bytes(in_one.other_bytes, in_other.other_bytes);
    storage.recompute_bytes = growth.other_bytes(in_one.recompute_bytes, in_other.recompute_bytes);
  }
  // Levels that were recorded at other moments cannot be told apart: all rise as the highest ones do.
  const bool alike = one.other.size() == other.other.size();
  const auto highest = [](const StepRecord& of) {
    std::uint64_t most = 0;
    for (const StepRecord::Level& level : of.other) {
      most = std::max(most, level.bytes);
    }
    return most;
  };
  const std::uint64_t most = growth.other_bytes(highest(one), highest(other));
  for (std::size_t i = 0; i < record.other.size(); ++i) {
    std::uint64_t& bytes = record.other[i].bytes;
    bytes = alike ? growth.other_bytes(one.other[i].bytes, other.other[i].bytes)
                  : bytes + (most > highest(nearest) ? most - highest(nearest) : 0);
  }
  return record;
}

}  // namespace ebb

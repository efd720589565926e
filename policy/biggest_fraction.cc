#include "policy/biggest_fraction.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <stdexcept>
#include <string>
#include <utility>

namespace ebb {

BiggestFraction::BiggestFraction(double fraction, std::shared_ptr<Policy> inner)
    : Wrapper("biggest_fraction", std::move(inner)),
      fraction_(fraction),
      passing_at_threshold_(std::numeric_limits<std::size_t>::max()),
      left_at_threshold_(passing_at_threshold_) {
  if (!(fraction > 0 && fraction <= 1)) {  // written so that NaN fails too
    throw std::invalid_argument("biggest_fraction: the fraction is " + std::to_string(fraction) +
                                ", it must be over 0 and at most 1");
  }
}

void BiggestFraction::begin_step() {
  if (!sizes_.empty()) {
    learn();
    sizes_.clear();
  }
  left_at_threshold_ = passing_at_threshold_;
  Wrapper::begin_step();
}

void BiggestFraction::drop_step() {
  sizes_.clear();
  Wrapper::drop_step();
}

Decision BiggestFraction::decide(const Candidate& candidate) {
  sizes_.push_back(candidate.bytes);
  return passes(candidate.bytes) ? inner().decide(candidate) : Decision::kKeep;
}

void BiggestFraction::learn() {
  const auto nearest = static_cast<std::size_t>(std::llround(fraction_ * static_cast<double>(sizes_.size())));
  const auto count = static_cast<std::ptrdiff_t>(std::max<std::size_t>(nearest, 1));
  const auto last = sizes_.begin() + count - 1;
  std::nth_element(sizes_.begin(), last, sizes_.end(), std::greater<>());
  threshold_bytes_ = *last;
  passing_at_threshold_ = static_cast<std::size_t>(std::count(sizes_.begin(), last + 1, threshold_bytes_));
}

bool BiggestFraction::passes(std::uint64_t bytes) {
  if (bytes > threshold_bytes_) {
    return true;
  }
  if (bytes < threshold_bytes_ || left_at_threshold_ == 0) {
    return false;
  }
  --left_at_threshold_;
  return true;
}

std::shared_ptr<Policy> biggest_fraction(double fraction, std::shared_ptr<Policy> inner) {
  return std::make_shared<BiggestFraction>(fraction, std::move(inner));
}

}  // namespace ebb

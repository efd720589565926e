#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <random>
#include <vector>

namespace ebb::graphs {

// Seeded choices, the same on every machine: the standard library's distributions are not.
class Random {
 public:
  // Stream `number` of `seed`: neighbouring numbers give unrelated choices.
  Random(std::uint64_t seed, std::uint64_t number) : engine_(mix(mix(seed) + number)) {}

  [[nodiscard]] std::uint64_t next() { return engine_(); }

  // In [0, bound); bound > 0.
  [[nodiscard]] std::size_t below(std::size_t bound) { return static_cast<std::size_t>(next() % bound); }
  [[nodiscard]] bool percent(std::size_t chance) { return below(100) < chance; }

  template <typename T>
  [[nodiscard]] const T& one_of(const std::vector<T>& items) {
    return items[below(items.size())];
  }

  template <typename T, std::size_t N>
  [[nodiscard]] const T& one_of(const std::array<T, N>& items) {
    return items[below(N)];
  }

 private:
  // Sebastiano Vigna's splitmix64.
  static std::uint64_t mix(std::uint64_t x) {
    x += 0x9E3779B97F4A7C15;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB;
    return x ^ (x >> 31);
  }

  std::mt19937_64 engine_;
};

}  // namespace ebb::graphs

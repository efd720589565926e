#pragma once

#include <barrier>
#include <cstddef>
#include <thread>
#include <vector>

namespace ebb {

// Runs act(0), act(1), ... each on a thread of its own, and waits for them. They start together; none may use Catch2.
template <typename Act>
void on_threads(std::size_t count, const Act& act) {
  std::barrier start(static_cast<std::ptrdiff_t>(count));
  std::vector<std::jthread> threads;
  for (std::size_t i = 0; i < count; ++i) {
    threads.emplace_back([&, i] {
      start.arrive_and_wait();
      act(i);
    });
  }
}

}  // namespace ebb

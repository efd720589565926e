#include "test/random/crash_note.h"

#include <unistd.h>

#include <array>
#include <atomic>
#include <csignal>
#include <cstring>

namespace ebb::graphs {
namespace {

constexpr unsigned kSecondsPerGraph = 120;

std::atomic<std::uint64_t> current_seed;
std::atomic<std::uint64_t> current_graph;

// Only calls that a signal handler may make.
void write_text(const char* text) { (void)!write(STDERR_FILENO, text, std::strlen(text)); }

void write_number(std::uint64_t number) {
  std::array<char, 21> digits{};
  std::size_t at = digits.size() - 1;
  do {
    digits[--at] = static_cast<char>('0' + number % 10);
    number /= 10;
  } while (number > 0);
  write_text(&digits[at]);
}

void tell(int signal) {
  write_text(signal == SIGALRM ? "\nrandom: hangs" : "\nrandom: crashed");
  write_text(" in graph ");
  write_number(current_graph);
  write_text(" of seed ");
  write_number(current_seed);
  write_text("; repeat: random --graphs 1 --first ");
  write_number(current_graph);
  write_text(" --seed ");
  write_number(current_seed);
  write_text("\n");
  std::signal(signal, SIG_DFL);  // NOLINT(cert-err33-c): nothing to be done about it
  (void)raise(signal);
}

}  // namespace

void install_crash_note(std::uint64_t seed) {
  current_seed = seed;
  for (const int signal : {SIGSEGV, SIGABRT, SIGBUS, SIGFPE, SIGILL, SIGALRM}) {
    struct sigaction action {};
    action.sa_handler = tell;
    sigaction(signal, &action, nullptr);
  }
}

void set_crash_note(std::uint64_t graph) {
  current_graph = graph;
  alarm(kSecondsPerGraph);
}

}  // namespace ebb::graphs

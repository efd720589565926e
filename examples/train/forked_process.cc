#include "examples/train/forked_process.h"

#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <stdexcept>
#include <string_view>
#include <system_error>

#include <c10/util/Exception.h>

namespace ebb {
namespace {

// The first byte of what a child sends.
constexpr char kAnswer = 'A';
constexpr char kError = 'E';

constexpr std::uint64_t kBytesPerMaxrss = 1024;

[[noreturn]] void fail(const char* what) { throw std::system_error(errno, std::generic_category(), what); }

bool write_all(int pipe, std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t written = ::write(pipe, bytes.data(), bytes.size());
    if (written < 0 && errno != EINTR) {
      return false;
    }
    bytes.remove_prefix(written > 0 ? static_cast<std::size_t>(written) : 0);
  }
  return true;
}

std::string read_all(int pipe) {
  constexpr std::size_t kAtOnce = std::size_t{1} << 16;
  std::string bytes;
  for (;;) {
    const std::size_t had = bytes.size();
    bytes.resize(had + kAtOnce);
    const ssize_t count = ::read(pipe, bytes.data() + had, kAtOnce);
    bytes.resize(had + (count > 0 ? static_cast<std::size_t>(count) : 0));
    if (count == 0 || (count < 0 && errno != EINTR)) {
      return bytes;
    }
  }
}

std::string answer_or_error(const std::function<std::string()>& work) {
  try {
    return kAnswer + work();
  } catch (const c10::Error& error) {
    return kError + std::string(error.what_without_backtrace());
  } catch (const std::exception& error) {
    return kError + std::string(error.what());
  }
}

}  // namespace

ProcessResult in_forked_process(const std::function<std::string()>& work) {
  int ends[2];
  if (::pipe(ends) != 0) {
    fail("cannot make a pipe");
  }
  std::fflush(nullptr);  // what is buffered would be printed by both processes
  const pid_t parent = ::getpid();
  const pid_t child = ::fork();
  if (child < 0) {
    fail("cannot fork");
  }
  if (child == 0) {
    ::close(ends[0]);
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (::getppid() != parent) {
      std::_Exit(EXIT_FAILURE);
    }
    std::exit(write_all(ends[1], answer_or_error(work)) ? EXIT_SUCCESS : EXIT_FAILURE);
  }
  ::close(ends[1]);
  const std::string sent = read_all(ends[0]);
  ::close(ends[0]);
  int status = 0;
  struct rusage usage = {};
  while (::wait4(child, &status, 0, &usage) < 0) {
    if (errno != EINTR) {
      fail("cannot wait for a child process");
    }
  }
  if (WIFSIGNALED(status)) {
    throw std::runtime_error(std::string("the process of this run was ended by: ") + strsignal(WTERMSIG(status)));
  }
  if (sent.empty() || (sent.front() == kAnswer && status != 0)) {
    throw std::runtime_error("the process of this run ended without an answer");
  }
  if (sent.front() == kError) {
    throw std::runtime_error(sent.substr(1));
  }
  return {sent.substr(1), static_cast<std::uint64_t>(usage.ru_maxrss) * kBytesPerMaxrss};
}

std::uint64_t peak_resident_bytes() {
  struct rusage usage = {};
  if (::getrusage(RUSAGE_SELF, &usage) != 0) {
    fail("cannot ask for this process's memory");
  }
  return static_cast<std::uint64_t>(usage.ru_maxrss) * kBytesPerMaxrss;
}

}  // namespace ebb

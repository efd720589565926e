#include "test/train/program.h"

#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <iterator>
#include <stdexcept>

namespace ebb {
namespace {

namespace fs = std::filesystem;

// Bazel starts a test in the folder of its data; started by hand it lies beside examples/ or under bazel-bin/.
fs::path find_program(const std::string& name) {
  for (const char* root : {".", "bazel-bin"}) {
    auto path = fs::absolute(fs::path(root) / "examples" / name / name);
    if (fs::is_regular_file(path)) {
      return path;
    }
  }
  throw std::runtime_error("examples/" + name + " is not built under " + fs::current_path().string());
}

constexpr int kNotStarted = 127;  // as shells have it

int exit_status(int waited) {
  constexpr int kSignalBase = 128;
  return WIFEXITED(waited) ? WEXITSTATUS(waited) : kSignalBase + WTERMSIG(waited);
}

}  // namespace

TempFolder::TempFolder() {
  const char* parent = std::getenv("TEST_TMPDIR");
  std::string pattern = (fs::path(parent != nullptr ? parent : "/tmp") / "ebb_train_XXXXXX").string();
  if (mkdtemp(pattern.data()) == nullptr) {
    throw std::runtime_error("cannot make a folder like " + pattern);
  }
  path_ = pattern;
}

TempFolder::~TempFolder() {
  std::error_code ignored;
  fs::remove_all(path_, ignored);
}

Outcome run_program(const std::string& name, const std::string& arguments, const std::string& before) {
  const TempFolder folder;
  const std::string command = before + " exec " + find_program(name).string() + " " + arguments + " >" +
                              folder.file("out").string() + " 2>" + folder.file("err").string();
  const pid_t child = ::fork();
  if (child == 0) {
    ::execl("/bin/sh", "sh", "-c", command.c_str(), nullptr);
    std::_Exit(kNotStarted);
  }
  int waited = 0;
  struct rusage usage = {};
  if (child < 0 || ::wait4(child, &waited, 0, &usage) != child) {
    throw std::runtime_error("cannot run " + command);
  }
  constexpr std::uint64_t kBytesPerMaxrss = 1024;
  return {exit_status(waited), read_file(folder.file("out")), read_file(folder.file("err")),
          static_cast<std::uint64_t>(usage.ru_maxrss) * kBytesPerMaxrss};
}

std::string read_file(const fs::path& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()};
}

void write_file(const fs::path& path, const std::string& bytes) { std::ofstream(path, std::ios::binary) << bytes; }

}  // namespace ebb

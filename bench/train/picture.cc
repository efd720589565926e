#include "bench/train/picture.h"

#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cstdio>
#include <cstdlib>
#include <optional>
#include <string>
#include <system_error>
#include <vector>

namespace ebb {
namespace {

namespace fs = std::filesystem;

constexpr const char* kScript = "bench/plot_memory.py";

// Beside the program as Bazel lays out its data, in the checkout that ./dev names, or under the current folder.
std::optional<fs::path> find_script() {
  std::error_code ignored;
  std::vector<fs::path> roots = {fs::read_symlink("/proc/self/exe", ignored).string() + ".runfiles/ebb"};
  if (const char* root = std::getenv("EBB_ROOT")) {
    roots.emplace_back(root);
  }
  roots.emplace_back(".");
  for (const auto& root : roots) {
    if (fs::exists(root / kScript, ignored)) {
      return root / kScript;
    }
  }
  return std::nullopt;
}

// Whether the command could be started and ended with 0.
bool succeeds(const std::vector<std::string>& command) {
  std::vector<char*> arguments;
  arguments.reserve(command.size() + 1);
  for (const auto& word : command) {
    arguments.push_back(const_cast<char*>(word.c_str()));
  }
  arguments.push_back(nullptr);
  pid_t child = 0;
  if (posix_spawnp(&child, arguments[0], nullptr, nullptr, arguments.data(), environ) != 0) {
    return false;
  }
  int status = 0;
  return waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

}  // namespace

bool draw_picture(const fs::path& folder) {
  const char* python = std::getenv("EBB_PYTHON");
  const auto script = find_script();
  const std::vector<std::string> command = {python != nullptr ? python : "python3", script ? script->string() : kScript,
                                            (folder / "report.json").string(), (folder / "memory.png").string()};
  if (script && succeeds(command)) {
    return true;
  }
  std::string line;
  for (const auto& word : command) {
    line += (line.empty() ? "" : " ") + word;
  }
  std::fprintf(stderr, "train: warning: memory.png was not drawn; with a Python that has matplotlib run: %s\n",
               line.c_str());
  return false;
}

}  // namespace ebb

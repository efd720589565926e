#include "bench/common/subprocess.h"

#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <stdexcept>

namespace ebb {
namespace {

std::string quoted(const std::string& word) {
  std::string text = "'";
  for (const char c : word) {
    text += c == '\'' ? std::string("'\\''") : std::string(1, c);
  }
  return text + "'";
}

}  // namespace

nlohmann::json run_subprocess(const std::vector<std::string>& arguments) {
  const std::filesystem::path folder =
      std::filesystem::temp_directory_path() / ("ebb-bench-" + std::to_string(getpid()));
  const std::filesystem::path answer = folder / "answer.json";
  std::string command = quoted(std::filesystem::read_symlink("/proc/self/exe").string());
  for (const std::string& argument : arguments) {
    command += " " + quoted(argument);
  }
  command += " --out " + quoted(answer.string());
  const int status = std::system(command.c_str());
  std::ifstream in(answer);
  nlohmann::json result = nlohmann::json::parse(in, nullptr, /*allow_exceptions=*/false);
  std::filesystem::remove_all(folder);
  if (status != 0 || result.is_discarded()) {
    throw std::runtime_error("this process failed: " + command);
  }
  return result;
}

}  // namespace ebb

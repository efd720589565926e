#pragma once

#include <cstdint>
#include <filesystem>
#include <string>

namespace ebb {

// A folder of its own for one test, gone with this object.
class TempFolder {
 public:
  TempFolder();
  ~TempFolder();
  TempFolder(const TempFolder&) = delete;
  TempFolder& operator=(const TempFolder&) = delete;

  [[nodiscard]] std::filesystem::path file(const std::string& name) const { return path_ / name; }

 private:
  std::filesystem::path path_;
};

// How a program ended, what it wrote and what it took.
struct Outcome {
  int status = 0;  // its exit code; 128 + N where signal N ended it, as shells count
  std::string out;
  std::string err;
  std::uint64_t peak_resident_bytes = 0;  // of it or of the largest process that it started and waited for
};

// Runs a program of examples/ ("train") that was built with the tests. `arguments` are words for a shell, and so is
// `before`, what the shell is to do first ("ulimit -f 8;").
Outcome run_program(const std::string& name, const std::string& arguments, const std::string& before = "");

std::string read_file(const std::filesystem::path& path);
void write_file(const std::filesystem::path& path, const std::string& bytes);

}  // namespace ebb

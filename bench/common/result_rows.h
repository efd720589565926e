#pragma once

#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

namespace ebb {

// A benchmark's results: one JSON object for each row, printed as a line and kept in a file as an array.
//
// Threads: one at a time.
class ResultRows {
 public:
  // `out`: empty for no file. Makes the file's folder, and throws std::runtime_error if the file cannot be written: now
  // rather than after the measurements.
  explicit ResultRows(std::filesystem::path out);

  // Prints the row, and writes the file anew with all rows so far: a run that is interrupted keeps what it has.
  void add(nlohmann::json row);

  // Writes the file with the rows so far, even if there are none.
  void save() const;

 private:
  const std::filesystem::path out_;
  nlohmann::json rows_ = nlohmann::json::array();
};

// Adds NAME_median, NAME_p10 and NAME_p90 of the samples, of which there is at least one.
void add_spread(nlohmann::json& row, const std::string& name, const std::vector<double>& samples);

// Runs a benchmark and returns its exit code. An exception is one line on stderr, "PROGRAM: error: ...", and code 1.
int run_benchmark(const char* program, const std::function<int()>& body);

}  // namespace ebb

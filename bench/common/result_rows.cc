#include "bench/common/result_rows.h"

#include <exception>
#include <iostream>
#include <utility>

#include <c10/util/Exception.h>

#include "bench/common/percentile.h"
#include "examples/common/atomic_file.h"

namespace ebb {
namespace {

int report(const char* program, const std::string& message) {
  // CUDA's errors go on for several lines with advice on how to debug kernels; there are none here.
  std::cerr << program << ": error: " << message.substr(0, message.find('\n')) << "\n";
  return 1;
}

}  // namespace

ResultRows::ResultRows(std::filesystem::path out) : out_(std::move(out)) {
  if (out_.empty()) {
    return;
  }
  if (out_.has_parent_path()) {
    make_folder(out_.parent_path());
  }
  require_writable(out_);
}

void ResultRows::add(nlohmann::json row) {
  std::cout << row.dump() << std::endl;
  rows_.push_back(std::move(row));
  save();
}

void ResultRows::save() const {
  if (!out_.empty()) {
    write_atomic_file(out_, rows_.dump(1) + "\n");
  }
}

void add_spread(nlohmann::json& row, const std::string& name, const std::vector<double>& samples) {
  row[name + "_median"] = percentile(samples, 0.5);
  row[name + "_p10"] = percentile(samples, 0.1);
  row[name + "_p90"] = percentile(samples, 0.9);
}

int run_benchmark(const char* program, const std::function<int()>& body) {
  try {
    return body();
  } catch (const c10::Error& error) {
    return report(program, error.what_without_backtrace());
  } catch (const std::exception& error) {
    return report(program, error.what());
  }
}

}  // namespace ebb

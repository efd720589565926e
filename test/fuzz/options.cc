#include <cmath>
#include <iostream>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "bench/step/options.h"
#include "examples/llama/config.h"
#include "examples/train/options.h"
#include "test/fuzz/targets.h"

namespace ebb {
namespace {

// Programs print their usage errors; here nobody reads them.
class Silence {
 public:
  Silence() : out_(std::cout.rdbuf(sink_.rdbuf())), err_(std::cerr.rdbuf(sink_.rdbuf())) {}
  ~Silence() {
    std::cout.rdbuf(out_);
    std::cerr.rdbuf(err_);
  }
  Silence(const Silence&) = delete;
  Silence& operator=(const Silence&) = delete;

 private:
  std::ostringstream sink_;
  std::streambuf* const out_;
  std::streambuf* const err_;
};

// What `main` would be given.
class Arguments {
 public:
  explicit Arguments(FuzzInput input) {
    std::istringstream lines(std::string(input.begin(), input.end()));
    for (std::string line; std::getline(lines, line);) {
      words_.push_back(line.substr(0, line.find('\0')));
    }
    for (std::string& word : words_) {
      pointers_.push_back(word.data());
    }
    pointers_.push_back(nullptr);
  }

  [[nodiscard]] int count() const { return static_cast<int>(words_.size()); }
  char** values() { return pointers_.data(); }

 private:
  std::vector<std::string> words_{"program"};
  std::vector<char*> pointers_;
};

// Whether the arguments are good to go on with.
template <typename ProgramOptions>
bool parse(FuzzInput input, ProgramOptions& options) {
  Arguments arguments(input);
  const Silence silence;
  try {
    return !parse_options(arguments.count(), arguments.values(), options);
  } catch (const std::invalid_argument& error) {
    require_of_parser(*error.what() != '\0', "an error without a text");
    return false;
  }
}

void require_fits(const std::optional<std::uint64_t>& bytes) {
  require_of_parser(!bytes || (*bytes >= 1 && *bytes < (std::uint64_t{1} << 63)), "a size outside of its range");
}

}  // namespace

void fuzz_train_options(FuzzInput input) {
  TrainOptions options;
  if (!parse(input, options)) {
    return;
  }
  // What the program makes of them first, before it looks at anything else.
  require_of_parser(parameter_count(options.model) > 0, "a model without parameters");
  require_of_parser(options.batch * options.seq + 1 > 1, "a batch without tokens");
  require_of_parser(options.steps >= options.until && options.until >= 1, "a run without steps");
  require_of_parser(std::isfinite(options.learning_rate) && options.learning_rate > 0, "no learning rate");
  require_of_parser(std::isfinite(options.weight_decay) && options.weight_decay >= 0, "no weight decay");
  require_fits(options.ebb.stash_bytes);
  require_fits(options.ebb.window_bytes);
  require_fits(options.ebb.capacity_bytes);
  require_fits(options.minimum_bytes);
}

void fuzz_step_options(FuzzInput input) {
  StepOptions options;
  if (!parse(input, options)) {
    return;
  }
  require_of_parser(layers(chosen_shape(options)) > 0, "a model without layers");
  require_of_parser(options.pairs >= 1 && options.warm_up >= 0, "nothing to measure");
  require_fits(options.stash_bytes);
  require_fits(options.window_bytes);
}

}  // namespace ebb

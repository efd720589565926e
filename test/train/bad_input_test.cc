#include <algorithm>
#include <filesystem>
#include <string>

#include <catch2/catch.hpp>

#include "test/train/program.h"
#include "test/train/tiny_run.h"

namespace ebb {
namespace {

void check_refused(const Outcome& outcome, const std::string& error) {
  CHECK(outcome.status == 1);
  CHECK(outcome.err == "train: error: " + error + "\n");
}

// CLI11's own form: the flag, what is wrong, and where to read more.
void check_usage_error(const Outcome& outcome, const std::string& error) {
  CHECK(outcome.status > 1);
  CHECK(outcome.err.find(error) != std::string::npos);
  CHECK(std::count(outcome.err.begin(), outcome.err.end(), '\n') == 2);
}

}  // namespace

TEST_CASE("a text that is missing, empty or too short is refused with its path or its numbers", "[train]") {
  const TinyRun train;
  const auto missing = train.file("missing");
  check_refused(train("--text " + missing), "no text found at " + missing + ": no such file or folder");
  const auto folder = train.file("folder");
  std::filesystem::create_directory(folder);
  check_refused(train("--text " + folder), "no text found at " + folder + ": the folder has no files");
  const auto shorter = train.file("short");
  write_file(shorter, std::string(64, 'x'));
  check_refused(train("--text " + shorter), "the text has 64 bytes, and one batch of 2 x 32 needs 65");
}

TEST_CASE("a text of exactly one batch can be trained on", "[train]") {
  const TinyRun train;
  write_file(train.file("just"), std::string(65, 'x'));
  CHECK(train("--text " + train.file("just")).status == 0);
}

TEST_CASE("sizes that do not fit together are refused with both numbers", "[train]") {
  const TinyRun train;
  check_refused(train("--heads 5"), "heads must divide dim: 32 is not a multiple of 5");
  check_refused(train("--kv-heads 3"), "kv-heads must divide heads: 4 is not a multiple of 3");
  check_refused(train("--dim 36"), "dim / heads must be even for rope, got 9");
  check_refused(train("--layers 0"), "layers must be at least 1, got 0");
  check_refused(train("--until 5"), "--until must be at most --steps: 5 is over 4");
}

TEST_CASE("numbers that would overflow, or are none, are refused before anything is made of them", "[train]") {
  const TinyRun train;
  check_refused(train("--dim 4611686018427387904"), "dim must be at most 1048576, got 4611686018427387904");
  check_usage_error(train("--lr inf"), "--lr: 'inf' is no number above 0");
  check_usage_error(train("--weight-decay 1e999"), "--weight-decay: '1e999' is no number from 0 up");
  check_usage_error(train("--batch 4294967296"), "--batch: Value 4294967296 not in range 1 to 1073741824");
}

TEST_CASE("a device that is unknown or not there is refused by name", "[train]") {
  const TinyRun train;
  check_refused(train("--device gpu"), "unknown device 'gpu': use auto, cpu, cuda or cuda:N");
  CHECK(train("--device cuda:99").err.find("device cuda:99 is not there") != std::string::npos);
}

TEST_CASE("flags with unusable values are usage errors that name the flag", "[train]") {
  const TinyRun train;
  check_usage_error(train("--dtype float16"), "--dtype: float16 not in {float32,bfloat16}");
  check_usage_error(train("--manage ssd"), "--manage: 'ssd' is none of disk host");
  check_usage_error(train("--recompute some"), "--recompute: 'some' is none of all cheap none");
  check_usage_error(train("--io fast"), "--io: 'fast' is none of auto threads uring");
  check_usage_error(train("--window 64MXB"), "--window: '64MXB' has no known unit");
  check_usage_error(train("--steps none"), "--steps: 'none' is no number above 0");
  check_usage_error(train("--steps 0"), "--steps: '0' is no number above 0");
  check_usage_error(train("--weight-decay nan"), "--weight-decay: 'nan' is no number from 0 up");
  check_usage_error(train("--compare --no-offload"), "--compare excludes --no-offload");
  check_usage_error(train("--manage host --no-offload"), "--no-offload excludes --manage");
  check_usage_error(train("--manage tape"), "--manage");
  check_refused(train("--manage host --optimizer-home disk"),
                "--manage and --optimizer-home name two homes, and one offloader has one");
  check_refused(train("--managed-bytes 1MB"),
                "--managed-bytes is the bound of what --manage and --optimizer-home move");
  check_usage_error(train("--colour red"), "--colour");
  for (const char* const budget : {"half", "1.5", "0", "nan", "''"}) {
    check_usage_error(train(std::string("--device-budget ") + budget), "is neither a share in (0, 1] nor a size");
  }
  check_usage_error(train("--device-budget 2XB"), "--device-budget: '2XB' has no known unit");
  check_usage_error(train("--budget-is-a-wish"), "--budget-is-a-wish requires --device-budget");
}

TEST_CASE("a spill folder that is not there is one error that names it", "[train]") {
  const TinyRun train;
  const auto outcome = train("--spill-folder " + train.file("nowhere"));
  CHECK(outcome.status == 1);
  CHECK(outcome.err.rfind("train: error: ", 0) == 0);
  CHECK(outcome.err.find(train.file("nowhere")) != std::string::npos);
  CHECK(std::count(outcome.err.begin(), outcome.err.end(), '\n') == 1);
}

// A file stands in the way, because for root no folder is closed.
TEST_CASE("a report folder that cannot be made is one error before any training", "[train]") {
  const TinyRun train;
  const auto outcome = train("--report " + train.file("text/report"));
  check_refused(outcome, "cannot make the folder " + train.file("text/report") + ": Not a directory");
  CHECK(outcome.out.empty());
}

TEST_CASE("a report that cannot be written is one error before any training", "[train]") {
  const TinyRun train;
  std::filesystem::create_directories(train.file("report/report.json"));
  const auto outcome = train("--report " + train.file("report"));
  check_refused(outcome, "cannot write " + train.file("report/report.json") + ": Is a directory");
  CHECK(outcome.out.empty());
}

TEST_CASE("a checkpoint that cannot be saved where asked is one error before any training", "[train]") {
  const TinyRun train;
  const auto outcome = train("--save " + train.file("nowhere/checkpoint"));
  check_refused(outcome, "cannot write " + train.file("nowhere/checkpoint") + ": No such file or directory");
  CHECK(outcome.out.empty());
}

// The file-size limit stands for a disk that fills up while ebb spills to it.
TEST_CASE("a disk that fills up while spilling ends the run after that step with one error", "[train]") {
  const TinyRun train;
  const auto outcome = train("--layers 4", "trap '' XFSZ; ulimit -f 64;");
  CHECK(outcome.status == 1);
  CHECK(outcome.err.find("train: error: step 1: no room for ") != std::string::npos);
  CHECK(outcome.err.find("--spill-folder") != std::string::npos);
}

}  // namespace ebb

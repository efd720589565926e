#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include <catch2/catch.hpp>
#include <nlohmann/json.hpp>

#include "examples/train/tensor_file.h"
#include "test/train/program.h"
#include "test/train/tiny_run.h"

namespace ebb {
namespace {

using Json = nlohmann::json;

Json losses_of(const TinyRun& train, const std::string& flags) {
  const auto outcome = train(flags + " --report " + train.file("report"));
  INFO(outcome.err);
  REQUIRE(outcome.status == 0);
  return Json::parse(read_file(train.file("report/report.json")))["losses"];
}

}  // namespace

TEST_CASE("a resumed run goes on with the losses of one that was never interrupted", "[train]") {
  const TinyRun train;
  const auto whole = losses_of(train, "--steps 6");
  const std::string saver = GENERATE("", " --manage disk --optimizer-home disk --managed-bytes 1B --minimum 1B");
  const auto first = losses_of(train, "--steps 6 --until 3 --save " + train.file("checkpoint") + saver);
  const std::string managed = GENERATE("", " --manage disk --optimizer-home disk --managed-bytes 1B --minimum 1B");
  const auto second = losses_of(train, "--steps 6 --resume " + train.file("checkpoint") + managed);
  REQUIRE(first.size() == 3);
  REQUIRE(second.size() == 3);
  for (int i = 0; i < 3; ++i) {
    CHECK(first[i] == whole[i]);
    CHECK(second[i] == whole[i + 3]);
  }
}

TEST_CASE("a comparison of a resumed run starts both sides from the checkpoint", "[train]") {
  const TinyRun train;
  losses_of(train, "--until 2 --save " + train.file("checkpoint"));
  const auto outcome = train("--compare --resume " + train.file("checkpoint"));
  INFO(outcome.err);
  CHECK(outcome.status == 0);
  CHECK(outcome.out.find("losses: all 2 equal bit for bit") != std::string::npos);
}

// The second run would start from what the first had saved, and fail after all the training.
TEST_CASE("a comparison that would save over the checkpoint it starts from is refused, whatever the path", "[train]") {
  const TinyRun train;
  losses_of(train, "--until 2 --save " + train.file("checkpoint"));
  const auto before = read_file(train.file("checkpoint"));
  for (const auto& save : {train.file("checkpoint"), train.file("./checkpoint")}) {
    const auto outcome = train("--compare --resume " + train.file("checkpoint") + " --save " + save);
    CHECK(outcome.status == 1);
    CHECK(outcome.out.empty());
    CHECK(outcome.err == "train: error: --compare starts twice from --resume " + train.file("checkpoint") +
                             ", so --save must name another file\n");
  }
  CHECK((read_file(train.file("checkpoint")) == before));  // in brackets: bytes are not to be printed
}

TEST_CASE("a run can be resumed with shorter and with longer sequences, and compared", "[train]") {
  const TinyRun train;
  losses_of(train, "--until 2 --save " + train.file("checkpoint"));
  for (const char* seq : {"16", "64"}) {
    const auto outcome = train("--compare --resume " + train.file("checkpoint") + " --seq " + seq);
    INFO(outcome.err);
    CHECK(outcome.status == 0);
    CHECK(outcome.out.find("losses: all 2 equal bit for bit") != std::string::npos);
  }
}

TEST_CASE("a checkpoint of other sizes is refused with both sizes", "[train]") {
  const TinyRun train;
  losses_of(train, "--save " + train.file("checkpoint"));
  const auto outcome = train("--steps 8 --layers 3 --resume " + train.file("checkpoint"));
  CHECK(outcome.status == 1);
  CHECK(outcome.err == "train: error: cannot resume from " + train.file("checkpoint") +
                           ": it was saved with layers 2, and this run has layers 3\n");
}

TEST_CASE("a checkpoint that has done all steps is refused with both numbers", "[train]") {
  const TinyRun train;
  losses_of(train, "--save " + train.file("checkpoint"));
  const auto outcome = train("--resume " + train.file("checkpoint"));
  CHECK(outcome.status == 1);
  CHECK(outcome.err.find("has done 4 steps, and this run ends after 4") != std::string::npos);
}

TEST_CASE("what is no checkpoint, or half of one, is refused by name", "[train]") {
  const TinyRun train;
  losses_of(train, "--save " + train.file("checkpoint"));
  const auto whole = read_file(train.file("checkpoint"));
  write_file(train.file("half"), whole.substr(0, whole.size() / 2));
  for (const auto& name : {train.file("half"), train.file("text")}) {
    const auto outcome = train("--steps 8 --resume " + name);
    CHECK(outcome.status == 1);
    CHECK(outcome.err == "train: error: cannot resume from " + name +
                             ": it is not a checkpoint, or it is damaged: its checksum does not match\n");
  }
}

TEST_CASE("a checkpoint of which one byte has changed is refused by name, with the reason", "[train]") {
  const TinyRun train;
  losses_of(train, "--save " + train.file("checkpoint"));
  auto bytes = read_file(train.file("checkpoint"));
  bytes[bytes.size() / 2] ^= 1;
  write_file(train.file("checkpoint"), bytes);
  const auto outcome = train("--steps 8 --resume " + train.file("checkpoint"));
  CHECK(outcome.status == 1);
  CHECK(outcome.err == "train: error: cannot resume from " + train.file("checkpoint") +
                           ": it is not a checkpoint, or it is damaged: its checksum does not match\n");
}

// LibTorch's own reader would put the file's tensor in the place of the model's.
TEST_CASE("a whole file whose tensors are not the model's is refused by the first that differs", "[train]") {
  const TinyRun train;
  const std::map<std::string, std::string> texts{{"vocab", "256"},     {"dim", "32"},      {"layers", "2"},
                                                 {"heads", "4"},       {"kv-heads", "2"},  {"ffn", "64"},
                                                 {"dtype", "float32"}, {"steps_done", "1"}};
  const auto resumed = [&](std::vector<TensorSpec> tensors) {
    TensorFileWriter(train.file("crafted"), texts, tensors).commit();
    return train("--resume " + train.file("crafted")).err;
  };
  const std::string refusal = "train: error: cannot resume from " + train.file("crafted") + ": ";
  CHECK(resumed({}) == refusal + "it is not a checkpoint of this program: it has no model.embedding\n");
  CHECK(resumed({{"model.embedding", "F32", {0, 32}}}) ==
        refusal + "its model.embedding has another type or other sizes than the model's\n");
}

// The file-size limit stands for a disk that fills up: writing past 32 KiB fails. Without offload, because a spill
// file would meet the limit first.
TEST_CASE("a save that finds the disk full keeps the old checkpoint and leaves no partial one", "[train]") {
  const TinyRun train;
  losses_of(train, "--save " + train.file("checkpoint"));
  const auto before = read_file(train.file("checkpoint"));
  REQUIRE(before.size() > (std::size_t{64} << 10));
  const auto outcome =
      train("--no-offload --steps 5 --save " + train.file("checkpoint"), "trap '' XFSZ; ulimit -f 64;");
  CHECK(outcome.status == 1);
  CHECK(outcome.err == "train: error: cannot write " + train.file("checkpoint") + ": File too large\n");
  CHECK((read_file(train.file("checkpoint")) == before));  // in brackets: bytes are not to be printed
  CHECK_FALSE(std::filesystem::exists(train.file("checkpoint.partial")));
}

// As above, but the signal of the limit is let through: it kills the program in the middle of its writing.
TEST_CASE("a run killed while it saves leaves the old checkpoint, from which one can resume", "[train]") {
  const TinyRun train;
  losses_of(train, "--until 2 --save " + train.file("checkpoint"));
  const auto before = read_file(train.file("checkpoint"));
  const auto outcome = train("--no-offload --save " + train.file("checkpoint"), "ulimit -c 0; ulimit -f 64;");
  CHECK(outcome.status > 128);
  CHECK((read_file(train.file("checkpoint")) == before));  // in brackets: bytes are not to be printed
  CHECK(losses_of(train, "--resume " + train.file("checkpoint") + " --save " + train.file("checkpoint")).size() == 2);
  CHECK_FALSE(std::filesystem::exists(train.file("checkpoint.partial")));
}

}  // namespace ebb

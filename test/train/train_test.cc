#include <algorithm>
#include <filesystem>
#include <vector>

#include <catch2/catch.hpp>
#include <nlohmann/json.hpp>

#include "offload/base/human_bytes.h"
#include "test/train/program.h"
#include "test/train/tiny_run.h"

namespace ebb {
namespace {

using Json = nlohmann::json;

Json report_of(const TinyRun& train, const std::string& flags) {
  const auto outcome = train(flags + " --report " + train.file("report"));
  INFO(outcome.out << outcome.err);
  REQUIRE(outcome.status == 0);
  return Json::parse(read_file(train.file("report/report.json")));
}

}  // namespace

TEST_CASE("training with ebb gives the same loss bits as training without", "[train]") {
  const TinyRun train;
  const auto report = report_of(train, "--compare");
  CHECK(report["losses_equal"] == true);
  CHECK(report["deterministic"] == true);
  CHECK(report["losses"].size() == 4);
  CHECK(report["losses"] == report["plain_losses"]);
  CHECK(report["losses"][0].get<double>() == Approx(5.545).margin(0.1));  // ln 256: an untrained model knows nothing
  CHECK(report["losses"][3].get<double>() < report["losses"][0].get<double>());
}

TEST_CASE("bfloat16 training with ebb gives the same loss bits as training without", "[train]") {
  const TinyRun train;
  const auto report = report_of(train, "--compare --dtype bfloat16");
  CHECK(report["losses_equal"] == true);
  CHECK(report["dtype"] == "bfloat16");
}

TEST_CASE("training whose weights, gradients and optimizer live elsewhere gives the same loss bits", "[train]") {
  const TinyRun train;
  const std::string dtype = GENERATE("float32", "bfloat16");
  const std::string homes = GENERATE("--manage disk --optimizer-home disk", "--manage host --optimizer-home host",
                                     "--manage disk", "--optimizer-home host");
  const std::string bound = GENERATE("1B", "64KiB");
  const auto report =
      report_of(train, "--compare --minimum 1B --dtype " + dtype + " " + homes + " --managed-bytes " + bound);
  CHECK(report["losses_equal"] == true);
  CHECK(report["stats"]["managed"]["tensors"] > 0);
  CHECK(report["config"]["managed_bytes"] == (bound == "1B" ? 1 : 64 << 10));
  CHECK(report["config"]["manage"].is_null() == !homes.starts_with("--manage"));
}

TEST_CASE("the weights of the default width are managed by default", "[train]") {
  const TinyRun text;
  const auto outcome = run_program("train", "--device cpu --steps 1 --batch 1 --seq 16 --layers 1 --sample 0 --text '" +
                                                text.file("text") + "' --manage disk --optimizer-home disk");
  INFO(outcome.err);
  CHECK(outcome.status == 0);
  CHECK(outcome.out.find("managed: ") != std::string::npos);
  CHECK(outcome.out.find("managed: 0 tensors") == std::string::npos);
}

TEST_CASE("training that recomputes gives the same loss bits, and moves less", "[train]") {
  const std::string dtype = GENERATE("float32", "bfloat16");
  const TinyRun train;
  const std::string flags = "--compare --dtype " + dtype;
  const auto bytes = [](const Json& report, const char* what) {
    return report["stats"][what]["bytes"].get<std::uint64_t>();
  };
  const auto moving = report_of(train, flags);
  const auto cheap = report_of(train, flags + " --recompute cheap");
  const auto all = report_of(train, flags + " --recompute all");
  for (const Json& report : {moving, cheap, all}) {
    CHECK(report["losses_equal"] == true);
    CHECK(bytes(report, "recomputed") == bytes(report, "dropped"));
  }
  CHECK(all["config"]["recompute"] == "all");
  CHECK(bytes(moving, "recomputed") == 0);
  CHECK(bytes(cheap, "recomputed") > 0);
  CHECK(bytes(all, "recomputed") > bytes(cheap, "recomputed"));
  CHECK(bytes(cheap, "offloaded") < bytes(moving, "offloaded"));
  CHECK(bytes(all, "offloaded") < bytes(cheap, "offloaded"));
}

TEST_CASE("a comparison counts the saved bytes of both sides in the same way", "[train]") {
  const TinyRun train;
  const auto report = report_of(train, "--compare --layers 8");
  const auto plain = report["plain_peak_saved_bytes_on_device"].get<std::uint64_t>();
  // Of a block's saves, 8 have [2, 32, 32] and 4 have [2, 32, 64] float32 values, and at least as much is saved.
  CHECK(plain >= std::uint64_t{8} * (8 * 8192 + 4 * 16384));
  CHECK(report["peak_saved_bytes_on_device"].get<std::uint64_t>() < plain);
  CHECK(report["bytes_offloaded_per_step"].get<std::uint64_t>() > plain / 2);
  CHECK(report["peak_device_bytes"].get<std::uint64_t>() > 0);
  CHECK(report["plain_peak_device_bytes"].get<std::uint64_t>() > plain);
}

TEST_CASE("training with ebb takes less RAM as the system counts it, each run in a process of its own", "[train]") {
  const TinyRun train;
  // LibTorch alone takes half a GB. What is saved must count beside that.
  const std::string flags =
      "--compare --steps 2 --batch 16 --seq 512 --dim 128 --ffn 512 --layers 6 --minimum 1MiB --report ";
  const auto outcome = train(flags + train.file("report"));
  INFO(outcome.out << outcome.err);
  REQUIRE(outcome.status == 0);
  const auto report = Json::parse(read_file(train.file("report/report.json")));
  CHECK(report["losses_equal"] == true);
  const auto with = report["peak_resident_bytes"].get<std::uint64_t>();
  const auto without = report["plain_peak_resident_bytes"].get<std::uint64_t>();
  CHECK(outcome.peak_resident_bytes == without);
  CHECK(without > report["plain_peak_device_bytes"].get<std::uint64_t>());
  CHECK(with * 5 < without * 3);
  const auto row = outcome.out.find("\n  peak resident memory ");
  REQUIRE(row != std::string::npos);
  const std::string line = outcome.out.substr(row + 1, outcome.out.find('\n', row + 1) - row - 1);
  CHECK(line.find(" " + human_bytes(with) + " ") != std::string::npos);
  CHECK(line.ends_with(" " + human_bytes(without)));
}

TEST_CASE("the report's timeline rises in the forward pass and ends empty in backward", "[train]") {
  const TinyRun train;
  const auto report = report_of(train, "--compare");
  const auto& timeline = report["plain_timeline"];
  REQUIRE(timeline.size() > 2);
  CHECK(timeline.front()["backward"] == false);
  CHECK(timeline.back()["backward"] == true);
  CHECK(timeline.back()["saved_on_device"] == 0);
  const auto most = std::max_element(timeline.begin(), timeline.end(), [](const Json& a, const Json& b) {
    return a["saved_on_device"] < b["saved_on_device"];
  });
  CHECK((*most)["saved_on_device"] == report["plain_peak_saved_bytes_on_device"]);
}

TEST_CASE("a run without a comparison reports null for the plain side", "[train]") {
  const TinyRun train;
  const auto report = report_of(train, "");
  CHECK(report["losses_equal"].is_null());
  CHECK(report["deterministic"] == false);
  CHECK(report["plain_losses"].is_null());
  CHECK(report["device"] == "cpu");
  CHECK(report["steps"] == 4);
  CHECK(report["ms_per_step"].get<double>() > 0);
}

TEST_CASE("a run without offload moves nothing and gives the same losses", "[train]") {
  const TinyRun train;
  const auto with = report_of(train, "");
  const auto without = report_of(train, "--no-offload");
  CHECK(without["bytes_offloaded_per_step"] == 0);
  CHECK(without["losses"] == with["losses"]);
}

TEST_CASE("another seed gives other losses", "[train]") {
  const TinyRun train;
  CHECK(report_of(train, "--seed 2")["losses"] != report_of(train, "--seed 3")["losses"]);
}

TEST_CASE("a capacity that holds too little is reported and is not an error", "[train]") {
  const TinyRun train;
  const auto report = report_of(train, "--capacity 64KiB --compare");
  CHECK(report["losses_equal"] == true);
  CHECK(report["stats"]["kept"]["no room"]["tensors"].get<std::uint64_t>() > 0);
  CHECK(report["stats"]["pool"]["peak_bytes"].get<std::uint64_t>() <= (std::uint64_t{64} << 10));
}

TEST_CASE("a budget that cannot be met is an error that names the least, or a wish that is come near to", "[train]") {
  const TinyRun train;
  const auto refused = train("--device-budget 1KiB");
  CHECK(refused.status == 1);
  CHECK(refused.err.find("cannot be met: it is 1.0 KiB, and a step takes at least ") != std::string::npos);
  const auto wished = train("--device-budget 1KiB --budget-is-a-wish --compare --explain");
  CHECK(wished.status == 0);
  CHECK(wished.out.find("Steps are as near to it as can be.") != std::string::npos);
  CHECK(wished.out.find("(over the budget)") != std::string::npos);
}

TEST_CASE("the sample is as long as asked and the same for the same seed", "[train]") {
  const TinyRun train;
  const auto sample = [&] {
    const auto out = train("--sample 40").out;
    const auto start = out.find("sample:\n");
    REQUIRE(start != std::string::npos);
    return out.substr(start + 8, 40);
  };
  const auto first = sample();
  CHECK(first.size() == 40);
  CHECK(first == sample());
}

TEST_CASE("the training program explains itself", "[train]") {
  const auto outcome = run_program("train", "--help");
  CHECK(outcome.status == 0);
  for (const char* flag : {"--steps", "--compare", "--report", "--stash", "--window", "--spill-folder", "--resume"}) {
    CHECK(outcome.out.find(flag) != std::string::npos);
  }
}

TEST_CASE("the minimal program offloads in every step and its loss falls", "[train]") {
  const auto outcome = run_program("minimal", "");
  REQUIRE(outcome.status == 0);
  std::vector<double> losses;
  std::vector<double> offloaded;
  for (auto at = outcome.out.find("loss"); at != std::string::npos; at = outcome.out.find("loss", at + 1)) {
    losses.push_back(std::stod(outcome.out.substr(at + 4)));
    offloaded.push_back(std::stod(outcome.out.substr(outcome.out.find("offloaded", at) + 9)));
  }
  REQUIRE(losses.size() == 5);
  CHECK(losses.back() < losses.front());
  CHECK(offloaded.front() > 0);
  CHECK(std::is_sorted(offloaded.begin(), offloaded.end(), std::less_equal<>()));
}

}  // namespace ebb

#include "offload/recording/use_log.h"

#include <cstdint>

#include <catch2/catch.hpp>

namespace ebb {
namespace {

void pass_period(UseLog& log, bool failed = false) {
  log.step_begins();
  log.operation_begins();
  log.use(1, 10, /*written=*/false);
  log.backward_begins();
  log.operation_begins();
  log.use(1, 10, /*written=*/false);
  log.made(2, 10, /*follows=*/true);
  log.backward_is_over(failed);
  log.operation_begins();
  log.use(2, 10, /*written=*/false);
  log.use(1, 10, /*written=*/true);
}

TEST_CASE("A use log keeps a period that is over, with the phase of each use") {
  UseLog log;
  pass_period(log);
  CHECK_FALSE(log.last_period());
  log.step_begins();
  REQUIRE(log.last_period());
  REQUIRE(log.last_period()->size() == 5);
  CHECK(log.last_period()->at(0).phase == Phase::kForward);
  CHECK(log.last_period()->at(1).phase == Phase::kBackward);
  CHECK(log.last_period()->at(2).is_new);
  CHECK(log.last_period()->at(4).phase == Phase::kBetween);
  CHECK(log.last_period()->at(3).operation == log.last_period()->at(4).operation);
  CHECK(log.last_period()->at(1).operation != log.last_period()->at(0).operation);
}

TEST_CASE("A use log does not keep periods without a backward pass, with a failed one, or in which states were made") {
  UseLog log;
  log.step_begins();
  log.use(1, 10, /*written=*/true);
  log.step_begins();
  CHECK_FALSE(log.last_period());
  pass_period(log, /*failed=*/true);
  log.step_begins();
  CHECK_FALSE(log.last_period());
  pass_period(log);
  log.made(3, 10, /*follows=*/false);
  log.step_begins();
  CHECK_FALSE(log.last_period());
  pass_period(log);
  log.step_begins();
  CHECK(log.last_period());
}

TEST_CASE("A use log leaves out what is read after the last write between steps") {
  UseLog log;
  pass_period(log);
  log.operation_begins();
  log.use(1, 10, /*written=*/false);
  log.step_begins();
  REQUIRE(log.last_period());
  CHECK(log.last_period()->size() == 5);
}

}  // namespace
}  // namespace ebb

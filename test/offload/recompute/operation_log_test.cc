// Whose operations a thread's log sees, and when.

#include "offload/recompute/operation_log.h"

#include <ATen/Functions.h>

#include <catch2/catch.hpp>

#include "offload/managed/observed_operations.h"

namespace ebb {
namespace {

// Whether an operation that runs now is logged.
bool logs() {
  observe_operations();
  const at::Tensor made = at::ones({4}).requires_grad_().neg();
  const OperationLog* const log = OperationLog::here();
  return log != nullptr && log->value_of(made) != kNoValue;
}

TEST_CASE("operations are logged in a scope, but not at rest") {
  CHECK_FALSE(logs());
  {
    const OperationLog::Scope scope;
    CHECK(logs());
    OperationLog::rest();
    CHECK_FALSE(logs());
    OperationLog::wake();
    CHECK(logs());
    OperationLog::rest();
  }
  OperationLog::wake();
  CHECK_FALSE(logs());
  const OperationLog::Scope next;
  CHECK(logs());
}

TEST_CASE("a scope inside of one at rest is logged, and has told of later writes when it ends") {
  const OperationLog::Scope scope;
  OperationLog::rest();
  int told = 0;
  {
    const OperationLog::Scope inner;
    CHECK(logs());
    OperationLog::rest();  // which the outer scope does not ask for
    CHECK(logs());
    const at::Tensor made = at::ones({4}).requires_grad_().neg();
    OperationLog::here()->before_write(OperationLog::here()->value_of(made), [&](bool /*is_seen*/) { ++told; });
  }
  CHECK(told == 1);
}

TEST_CASE("what is not seen is not logged where the log wakes meanwhile, and is logged once it wakes later") {
  const OperationLog::Scope scope;
  OperationLog::rest();
  {
    const OperationLog::Unseen unseen;
    OperationLog::wake();
    CHECK_FALSE(logs());
  }
  CHECK_FALSE(logs());
  OperationLog::wake();
  CHECK(logs());
}

TEST_CASE("a write at rest is told before the log forgets the value") {
  const OperationLog::Scope scope;
  observe_operations();
  const at::Tensor made = at::ones({4}).requires_grad_().neg();
  OperationLog& log = *OperationLog::here();
  int told = 0;
  log.before_write(log.value_of(made), [&](bool is_seen) { told += is_seen ? 100 : 1; });
  OperationLog::rest();
  CHECK(told == 1);
  made.detach().zero_();
  CHECK(told == 1);
}

}  // namespace
}  // namespace ebb

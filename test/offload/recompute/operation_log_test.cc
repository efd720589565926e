// Whose operations a thread's log sees, and when.

#include "offload/recompute/operation_log.h"

#include <ATen/Functions.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

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

TEST_CASE("a scope inside of one at rest is logged") {
  const OperationLog::Scope scope;
  OperationLog::rest();
  const OperationLog::Scope inner;
  CHECK(logs());
  OperationLog::rest();  // which the outer scope does not ask for
  CHECK(logs());
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

// A compiled function that has found other keys is compiled anew.
TEST_CASE("the thread's dispatch keys are at rest as they were") {
  const OperationLog::Scope scope;
  const c10::DispatchKeySet before = c10::impl::tls_local_dispatch_key_set().included_;
  OperationLog::rest();
  CHECK(c10::impl::tls_local_dispatch_key_set().included_ == before);
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

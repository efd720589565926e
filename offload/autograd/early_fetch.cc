#include "offload/autograd/early_fetch.h"

#include <exception>

#include "offload/base/log.h"
#include "offload/runtime/runtime.h"
#include "offload/steps/tape.h"
#include "offload/tensors/put_off.h"

namespace ebb {
namespace {

struct Expected {
  std::weak_ptr<Runtime> runtime;
  std::weak_ptr<Tape> tape;
};

Expected& expected_here() {
  thread_local Expected expected;
  return expected;
}

}  // namespace

void EarlyFetch::expect(const std::shared_ptr<Runtime>& runtime, const std::shared_ptr<Tape>& tape) {
  expected_here() = {runtime, tape};
}

EarlyFetch::EarlyFetch() noexcept : exceptions_(std::uncaught_exceptions()) {
  try {
    start();
  } catch (...) {  // no memory for a guess
  }
}

void EarlyFetch::start() {
  const Expected& expected = expected_here();
  std::shared_ptr<Runtime> runtime = expected.runtime.lock();
  std::shared_ptr<Tape> tape = expected.tape.lock();
  if (runtime == nullptr || tape == nullptr || runtime->forked() || runtime->tier().captures()) {
    return;
  }
  runtime->tier().flush();
  runtime_ = std::move(runtime);
  tape_ = std::move(tape);
  if (tape_->plan() != nullptr) {  // what waits for its operation to be over would stay, and the plan has it away
    PutOff::of_this_thread().start_all();
  }
  if (!tape_->in_use() && !tape_->tried_early() && runtime_->decider().backward_begins(*tape_)) {
    fetched_ = true;
    tape_->fetch_early(runtime_->tier().current_stream());
    runtime_->tier().flush();
  }
}

EarlyFetch::~EarlyFetch() {
  if (runtime_ == nullptr || runtime_->forked()) {
    return;
  }
  if (fetched_ && !tape_->in_use()) {
    try {
      runtime_->steps().stall_watch().guessed_wrong();
      tape_->drop_guesses();
    } catch (...) {
      log_warning("what was fetched for another graph stays on the device until that is used or dropped");
    }
  }
  try {
    runtime_->decider().backward_is_over(*tape_, /*failed=*/failed_ || std::uncaught_exceptions() > exceptions_);
  } catch (...) {
    log_warning("a step could not be recorded; the next one is");
  }
  runtime_->tier().flush();
}

}  // namespace ebb

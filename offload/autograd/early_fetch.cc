#include "offload/autograd/early_fetch.h"

#include <exception>

#include "offload/autograd/core.h"
#include "offload/base/log.h"
#include "offload/residency/tape.h"
#include "offload/tensors/put_off.h"

namespace ebb {
namespace {

struct Expected {
  std::weak_ptr<Core> core;
  std::weak_ptr<Tape> tape;
};

Expected& expected_here() {
  thread_local Expected expected;
  return expected;
}

}  // namespace

void EarlyFetch::expect(const std::shared_ptr<Core>& core, const std::shared_ptr<Tape>& tape) {
  expected_here() = {core, tape};
}

EarlyFetch::EarlyFetch() noexcept : exceptions_(std::uncaught_exceptions()) {
  try {
    start();
  } catch (...) {  // no memory for a guess
  }
}

void EarlyFetch::start() {
  const Expected& expected = expected_here();
  std::shared_ptr<Core> core = expected.core.lock();
  std::shared_ptr<Tape> tape = expected.tape.lock();
  if (core == nullptr || tape == nullptr || core->forked() || core->tier().captures()) {
    return;
  }
  core->tier().flush();
  core_ = std::move(core);
  tape_ = std::move(tape);
  if (tape_->plan() != nullptr) {  // what waits for its operation to be over would stay, and the plan has it away
    PutOff::of_this_thread().start_all();
  }
  if (!tape_->in_use() && !tape_->tried_early() && core_->backward_begins(*tape_)) {
    fetched_ = true;
    tape_->fetch_early(core_->tier().current_stream());
    core_->tier().flush();
  }
}

EarlyFetch::~EarlyFetch() {
  if (core_ == nullptr || core_->forked()) {
    return;
  }
  if (fetched_ && !tape_->in_use()) {
    try {
      core_->guessed_wrong();
      tape_->drop_guesses();
    } catch (...) {
      log_warning("what was fetched for another graph stays on the device until that is used or dropped");
    }
  }
  try {
    core_->backward_is_over(*tape_, /*failed=*/failed_ || std::uncaught_exceptions() > exceptions_);
  } catch (...) {
    log_warning("a step could not be recorded; the next one is");
  }
  core_->tier().flush();
}

}  // namespace ebb

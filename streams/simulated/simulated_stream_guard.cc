#include "streams/simulated/simulated_stream_guard.h"

#include <utility>

namespace ebb {

namespace {

thread_local c10::StreamId current_stream = 0;

}  // namespace

SimulatedStreamGuard::SimulatedStreamGuard(c10::StreamId stream) : previous_(std::exchange(current_stream, stream)) {}

SimulatedStreamGuard::~SimulatedStreamGuard() { current_stream = previous_; }

c10::StreamId SimulatedStreamGuard::current() { return current_stream; }

}  // namespace ebb

#include "streams/base/process_mark.h"

#include <c10/util/Exception.h>

namespace ebb {

constinit std::atomic<std::uint64_t> ProcessMark::forks_{0};

void ProcessMark::refuse(const char* what) {
  TORCH_CHECK(false, "ebb: ", what,
              " was made before fork and cannot be used in the child process: its threads and its CUDA context did not "
              "survive, and what it saved cannot be had back here. Make a new one in the child.");
}

}  // namespace ebb

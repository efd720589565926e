#pragma once

#include <memory>

#include <ATen/core/ivalue.h>
#include <c10/util/ArrayRef.h>

namespace ebb {

// A process group's operation is over only when the c10d::Work is that it has returned: on a CPU another thread reads
// and writes the tensors after the operation, and on a GPU a stream of the process group's. The program may never wait.
//
// Has `uses` live until all work among the results is over, or longer: for work that cannot tell, until the next such
// call after the program has let go of the work. Null, for work on a GPU: has the current stream wait for the work.
void end_with_works(c10::ArrayRef<c10::IValue> results, const std::shared_ptr<const void>& uses);

}  // namespace ebb

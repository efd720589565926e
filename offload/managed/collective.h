#pragma once

#include <memory>

#include <ATen/core/function_schema.h>
#include <ATen/core/ivalue.h>
#include <c10/util/ArrayRef.h>

namespace ebb {

// Whether the operation is a process group's. It gives a c10d::Work, and is over only when that work is: on a CPU
// another thread reads and writes the tensors after the operation has returned.
[[nodiscard]] bool is_collective(const c10::FunctionSchema& schema);

// Has the current stream wait for all work among the results of a collective on a GPU. There such work runs on streams
// of the process group's, and the program may never wait.
void wait_for_works(c10::ArrayRef<c10::IValue> results);

// Has `held` live until all work among the results of a collective is over, or longer: for work that cannot tell, until
// the next such call after the program has let go of the work.
void hold_until_over(c10::ArrayRef<c10::IValue> results, const std::shared_ptr<const void>& held);

}  // namespace ebb

#include "offload/managed/collective.h"

#include <ATen/core/ivalue_inl.h>
#include <c10/util/Exception.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/custom_class.h>

namespace ebb {
namespace {

c10::intrusive_ptr<c10d::Work> work_of(const c10::IValue& result) {
  static const auto type = c10::getCustomClassType<c10::intrusive_ptr<c10d::Work>>();
  return result.isObject() && *result.type() == *type ? result.toCustomClass<c10d::Work>() : nullptr;
}

c10::intrusive_ptr<c10::ivalue::Future> future_of(c10d::Work& work) {
  try {
    return work.getFuture();
  } catch (const c10::Error&) {  // a backend need not have one
    return nullptr;
  }
}

}  // namespace

bool is_collective(const c10::FunctionSchema& schema) { return schema.name().starts_with("c10d::"); }

void hold_until_over(c10::ArrayRef<c10::IValue> results, const std::shared_ptr<const void>& held) {
  for (const c10::IValue& result : results) {
    const c10::intrusive_ptr<c10d::Work> work = work_of(result);
    if (work == nullptr) {
      continue;
    }
    if (const auto future = future_of(*work)) {
      future->addCallback([held](const c10::ivalue::Future& /*over*/) {});
    } else {
      work->wait();
    }
  }
}

}  // namespace ebb

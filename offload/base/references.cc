#include "offload/base/references.h"

#include <c10/core/StorageImpl.h>
#include <c10/core/TensorImpl.h>

#include "offload/base/interpreter.h"

namespace ebb {
namespace {

// Not PyObjectSlot::has_unique_reference(), which takes the GIL. The object lives: with the caller's reference there
// are two to `of`, and LibTorch then has one to the object.
template <typename Impl>
std::size_t count(std::size_t references, const Impl& of) {
  const Interpreter* const interpreter = Interpreter::here;
  const auto* const object = of.pyobj_slot()->load_pyobj();
  return references - (interpreter != nullptr && object != nullptr && interpreter->references(object) == 1 ? 1 : 0);
}

}  // namespace

std::size_t references_to(const c10::Storage& of) { return count(of.use_count(), *of.unsafeGetStorageImpl()); }

std::size_t references_to(const at::TensorBase& of) { return count(of.use_count(), *of.unsafeGetTensorImpl()); }

std::size_t references_to(const c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>& of) {
  return count(of.use_count(), *of);
}

}  // namespace ebb

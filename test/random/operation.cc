#include "test/random/operation.h"

#include <algorithm>
#include <iterator>
#include <map>
#include <stdexcept>
#include <string>

#include <ATen/ExpandUtils.h>
#include <ATen/Functions.h>
#include <c10/util/Exception.h>

namespace ebb::graphs {
namespace {

Operations all_operations() {
  Operations all{
      {"leaf", Kind::kMake, 0},
      {"constant", Kind::kMake, 0},
      {"shared", Kind::kMake, 0},
      {"guard", Kind::kScope, 0},
      {"no_op", Kind::kScope, 0},
      {"no_grad", Kind::kScope, 0},
      {"foreign", Kind::kScope, 0},
      {"leave", Kind::kScope, 0},
      {"backward", Kind::kBackward, 1},
      {"grad", Kind::kBackward, 1},
      {"crowd", Kind::kCrowd, 1},
      {"scale_gradients", Kind::kGradient, 0},
      {"zero_gradients", Kind::kGradient, 0},
  };
  for (const Operations& table :
       {elementwise_operations(), reducing_operations(), combining_operations(), matrix_operations(),
        network_operations(), custom_operations(), view_operations(), index_operations(), write_operations(),
        returning_operations(), data_operations(), region_operations(), stream_operations()}) {
    std::ranges::copy(table, std::back_inserter(all));
  }
  return all;
}

}  // namespace

const Operations& operations(Kind kind) {
  static const std::map<Kind, Operations> by_kind = [] {
    std::map<Kind, Operations> sorted;
    for (const Operation& each : all_operations()) {
      sorted[each.kind].push_back(each);
    }
    return sorted;
  }();
  return by_kind.at(kind);
}

const Operation& operation(std::string_view name) {
  static const std::map<std::string_view, const Operation*> by_name = [] {
    std::map<std::string_view, const Operation*> found;
    for (int kind = 0; kind <= static_cast<int>(Kind::kBackward); ++kind) {
      for (const Operation& each : operations(static_cast<Kind>(kind))) {
        if (!found.emplace(each.name, &each).second) {
          throw std::logic_error("two operations of the name " + std::string(each.name));
        }
      }
    }
    return found;
  }();
  return *by_name.at(name);
}

std::int64_t dimension(const at::Tensor& tensor, std::uint32_t number) {
  return tensor.dim() == 0 ? 0 : number % tensor.dim();
}

std::int64_t choose(std::uint32_t number, std::int64_t size) {
  TORCH_CHECK(size > 0, "nothing to choose from");
  return number % size;
}

bool share_a_storage(const at::Tensor& a, const at::Tensor& b) {
  return a.has_storage() && b.has_storage() && a.storage().unsafeGetStorageImpl() == b.storage().unsafeGetStorageImpl();
}

at::Tensor fit(const at::Tensor& tensor, const at::Tensor& like) {
  return at::is_expandable_to(tensor.sizes(), like.sizes()) ? tensor : tensor.flatten().select(0, 0);
}

at::Tensor as_matrix(const at::Tensor& tensor) {
  return tensor.dim() < 2 ? tensor.reshape({1, -1}) : tensor.flatten(0, -2);
}

}  // namespace ebb::graphs

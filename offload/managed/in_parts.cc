#include "offload/managed/in_parts.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <optional>
#include <vector>

#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include "offload/managed/registry.h"

namespace ebb {
namespace {

c10::impl::GenericList part_of(const c10::impl::GenericList& list, std::size_t begin, std::size_t end) {
  c10::impl::GenericList part(list.elementType());
  for (std::size_t place = begin; place < end; ++place) {
    part.push_back(list.get(place));
  }
  return part;
}

}  // namespace

bool run_in_parts(const c10::OperatorHandle& operation, torch::jit::Stack& stack) {
  const std::vector<c10::IValue> arguments = torch::jit::last(stack, operation.schema().arguments().size()).vec();
  std::size_t places = 0;
  for (const c10::IValue& each : arguments) {
    places = std::max(places, each.isTensorList() ? each.toListRef().size() : 0);
  }
  const auto is_whole = [&](const c10::IValue& each) { return each.isList() && each.toListRef().size() == places; };
  if (!std::ranges::all_of(arguments, [&](const c10::IValue& each) {  // an empty list may be one that is not needed
        return !each.isList() || is_whole(each) || each.toListRef().empty();
      })) {
    return false;
  }
  torch::jit::Stack results;
  std::size_t begin = 0;
  const auto run_until = [&](std::size_t end) {
    torch::jit::Stack part;
    for (const c10::IValue& each : arguments) {
      part.push_back(is_whole(each) ? c10::IValue(part_of(each.toList(), begin, end)) : each);
    }
    operation.callBoxed(&part);  // is observed as an operation of its own
    for (std::size_t i = 0; i < part.size(); ++i) {
      if (begin == 0) {
        results.push_back(part[i]);
      } else {
        results[i].toList().append(part[i].toList());
      }
    }
    begin = end;
  };
  std::optional<std::uint64_t> bound;  // of the set that manages the first managed tensor
  std::uint64_t in_part = 0;
  for (std::size_t place = 0; place < places; ++place) {
    std::uint64_t here = 0;
    for (const c10::IValue& each : arguments) {
      if (each.isTensorList() && is_whole(each)) {
        const Registry::Found found = Registry::all().find(each.toListRef()[place].toTensor());
        bound = found.set == nullptr ? bound : bound.value_or(found.set->device_bytes());
        here += found.managed == nullptr ? 0 : found.managed->bytes();
      }
    }
    if (place > begin && bound && in_part + here > *bound) {
      run_until(place);
      in_part = 0;
    }
    in_part += here;
  }
  if (begin == 0) {
    return false;
  }
  run_until(places);
  torch::jit::drop(stack, arguments.size());
  stack.insert(stack.end(), std::make_move_iterator(results.begin()), std::make_move_iterator(results.end()));
  return true;
}

}  // namespace ebb

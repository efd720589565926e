#include "offload/managed/postpone.h"

#include <algorithm>
#include <utility>
#include <vector>

#include <c10/util/Exception.h>

#include "offload/managed/registry.h"
#include "offload/managed/uses.h"

namespace ebb {
namespace {

using Tensors = PostponedWork::Tensors;

std::shared_ptr<const Tensors> use_on_device(const Tensors& tensors) {
  const at::TensorList all(tensors);
  const auto uses = std::make_shared<Uses>(/*read=*/all.slice(1, std::min<std::size_t>(all.size() - 1, 1)),
                                           /*written=*/all.slice(0, 1));
  return {uses, &tensors};
}

std::shared_ptr<const Tensors> use_at_home_if_possible(const Tensors& tensors) {
  std::shared_ptr<const Tensors> home = use_at_home(tensors);
  return home != nullptr ? home : use_on_device(tensors);
}

}  // namespace

std::shared_ptr<PostponedWork> postpone(const at::Tensor& target, at::TensorList others, PostponedWork::Work work,
                                        WorkAt at, PostponedWork::TargetUse target_use) {
  Tensors all{target};
  all.insert(all.end(), others.begin(), others.end());
  std::vector<Registry::Found> found;
  for (const at::Tensor& each : all) {
    found.push_back(Registry::all().find(each));
    if (found.back().managed == nullptr ||
        (found.size() > 1 && found.back().managed == found.front().managed)) {  // the work would keep the target alive
      return nullptr;
    }
  }
  refuse_capture(target);
  const auto are_about_to_change = [&](bool are_about_to) {  // until the work uses the bytes
    for (const Registry::Found& each : found) {
      each.managed->set_is_about_to_change(are_about_to);
    }
  };
  if (at == WorkAt::kHome) {
    for (const Registry::Found& each : found) {  // what was put off before changes the bytes first
      if (each.work != nullptr) {
        each.work->before_use();
      }
    }
    are_about_to_change(true);  // before the work can run
  }
  auto postponed = std::make_shared<PostponedWork>(found.front().set->shared_residency(), target, others,
                                                   at == WorkAt::kHome ? &use_at_home_if_possible : &use_on_device,
                                                   std::move(work), target_use);
  if (!Registry::all().postpone(all, postponed)) {
    are_about_to_change(false);
    return nullptr;
  }
  if (at == WorkAt::kHome) {
    for (const Registry::Found& each : found) {
      each.set->send_home(each.managed);
    }
  }
  return postponed;
}

void refuse_capture(const at::Tensor& managed) {
  const std::shared_ptr<ManagedSet> set = Registry::all().find(managed).set;
  TORCH_CHECK(set == nullptr || !set->residency().tier().captures(),
              "ebb: an update of a managed tensor cannot be part of a CUDA graph");
}

}  // namespace ebb

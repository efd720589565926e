#include "offload/managed/postpone.h"

#include <algorithm>
#include <new>
#include <utility>

#include <c10/util/Exception.h>
#include <c10/util/ScopeExit.h>

#include "offload/base/managed_key.h"
#include "offload/managed/at_home.h"
#include "offload/managed/registry.h"
#include "offload/managed/uses.h"

namespace ebb {
namespace {

// The target, and the first of the others.
PostponedWork::Brought bring_to_device(const at::Tensor& target, const std::vector<at::Tensor>& others) {
  const at::TensorList first = at::TensorList(others).slice(0, others.empty() ? 0 : 1);
  return {std::make_shared<OnDevice>(/*read=*/first, /*written=*/target), nullptr};
}

// Null where some of the tensors may be used without being seen.
std::shared_ptr<PostponedWork> postpone(const at::Tensor& target, at::TensorList others, PostponedWork::Bring bring,
                                        PostponedWork::Work work, PostponedWork::TargetUse target_use) {
  std::vector<at::Tensor> all = others.vec();
  all.push_back(target);
  const std::shared_ptr<ManagedSet> set = Registry::all().find(target).set;
  const auto can_wait = [&](const at::Tensor& other) {  // or the work would keep the target alive
    return is_managed(other) && other.has_storage() &&
           other.storage().unsafeGetStorageImpl() != target.storage().unsafeGetStorageImpl();
  };
  if (set == nullptr || !std::ranges::all_of(others, can_wait)) {
    return nullptr;
  }
  refuse_capture(target);
  auto postponed = std::make_shared<PostponedWork>(set->shared_residency(), target, others, std::move(bring),
                                                   std::move(work), target_use);
  return Registry::all().postpone(all, postponed) ? postponed : nullptr;
}

}  // namespace

bool postpone(const at::Tensor& target, at::TensorList others,
              std::function<void(const at::Tensor&, const std::vector<at::Tensor>&)> work,
              PostponedWork::TargetUse target_use) {
  return postpone(
             target, others, &bring_to_device,
             [work = std::move(work)](const at::Tensor& on, const auto& with, AtHome*) { work(on, with); },
             target_use) != nullptr;
}

std::shared_ptr<PostponedWork> postpone_at_home(const at::Tensor& target, at::TensorList others,
                                                PostponedWork::Work work, PostponedWork::TargetUse target_use,
                                                std::function<void()> prepare_on_device) {
  std::vector<Registry::Found> found;
  for (const at::Tensor& each : others) {
    found.push_back(Registry::all().find(each));
  }
  found.push_back(Registry::all().find(target));
  std::vector<std::weak_ptr<ManagedStorage>> changing;
  for (const Registry::Found& each : found) {
    changing.push_back(each.managed);
    if (each.work != nullptr) {  // it ends with saying that nothing is about to change
      each.work->before_use();
    }
  }
  const auto set_are_about_to_change = [changing](bool are_about_to) {
    for (const std::weak_ptr<ManagedStorage>& each : changing) {
      if (const std::shared_ptr<ManagedStorage> storage = each.lock()) {
        storage->set_is_about_to_change(are_about_to);
      }
    }
  };
  const auto bring = [prepare = std::move(prepare_on_device)](const at::Tensor& on,
                                                              const std::vector<at::Tensor>& with) {
    std::vector<at::Tensor> all{on};
    all.insert(all.end(), with.begin(), with.end());
    PostponedWork::Brought brought{nullptr, AtHome::of(all)};
    if (brought.at_home == nullptr) {
      brought = bring_to_device(on, with);
      if (prepare != nullptr) {
        prepare();
      }
    }
    return brought;
  };
  set_are_about_to_change(true);  // before the work can run
  auto undo = c10::make_scope_exit([&] { set_are_about_to_change(false); });
  auto postponed = postpone(
      target, others, bring,
      [set_are_about_to_change, work = std::move(work)](const at::Tensor& on, const auto& with, AtHome* home) {
        const auto over = c10::make_scope_exit([&] { set_are_about_to_change(false); });
        work(on, with, home);
      },
      target_use);
  if (postponed == nullptr) {
    return nullptr;
  }
  undo.release();
  try {
    for (const Registry::Found& each : found) {
      each.set->send_home(each.managed);
    }
  } catch (const std::bad_alloc&) {  // an early start is all that is lost
  }
  return postponed;
}

void refuse_capture(const at::Tensor& managed) {
  const std::shared_ptr<ManagedSet> set = Registry::all().find(managed).set;
  TORCH_CHECK(set == nullptr || !set->residency().tier().captures(),
              "ebb: an update of a managed tensor cannot be part of a CUDA graph");
}

}  // namespace ebb

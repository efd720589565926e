// What can be made, copied and moved of each type that owns something until its end. Checked when this is compiled.

#include <type_traits>

#include "offload/accounts/device_account.h"
#include "offload/accounts/gauge.h"
#include "offload/cache/fetched.h"
#include "offload/cache/home_block.h"
#include "offload/cache/residency.h"
#include "offload/cache/stash.h"
#include "offload/guard.h"
#include "offload/offloader.h"
#include "offload/steps/saved_storage.h"
#include "streams/base/block_pool.h"
#include "streams/base/mutex.h"
#include "streams/base/trace.h"
#include "streams/gpu/cuda_event.h"

namespace ebb {
namespace {

// Lives where it was made.
template <typename T>
constexpr bool kStays = !std::is_copy_constructible_v<T> && !std::is_copy_assignable_v<T> &&
                        !std::is_move_constructible_v<T> && !std::is_move_assignable_v<T>;

// Has one owner, and can change owners without failing.
template <typename T>
constexpr bool kIsHandedOn =
    !std::is_copy_constructible_v<T> && !std::is_copy_assignable_v<T> && std::is_nothrow_move_constructible_v<T>;

// Is made of something.
template <typename T>
constexpr bool kHasNoDefault = !std::is_default_constructible_v<T>;

static_assert(kStays<OffloadGuard> && kHasNoDefault<OffloadGuard>);
static_assert(std::is_constructible_v<OffloadGuard, Offloader&>);
static_assert(kStays<NoOpGuard>);
static_assert(kStays<MutexLock<Mutex>> && kHasNoDefault<MutexLock<Mutex>>);
static_assert(kStays<HostRange> && kHasNoDefault<HostRange>);
static_assert(kStays<Prefetching>);
static_assert(kStays<Fetched> && kHasNoDefault<Fetched>);
static_assert(kStays<SavedStorage::Use> && kHasNoDefault<SavedStorage::Use>);
static_assert(kStays<Stash> && kHasNoDefault<Stash>);
static_assert(kStays<CudaEvent> && kHasNoDefault<CudaEvent>);

static_assert(kIsHandedOn<Block> && std::is_nothrow_move_assignable_v<Block> && kHasNoDefault<Block>);
static_assert(kIsHandedOn<HomeBlock> && kHasNoDefault<HomeBlock>);
static_assert(kIsHandedOn<Gauge::Lease> && std::is_nothrow_move_assignable_v<Gauge::Lease>);
static_assert(kIsHandedOn<DeviceAccount::Held> && !std::is_move_assignable_v<DeviceAccount::Held>);
static_assert(kIsHandedOn<Stash::Place>);

}  // namespace
}  // namespace ebb

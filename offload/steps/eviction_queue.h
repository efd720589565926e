#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include <c10/core/Stream.h>

#include "offload/cache/fetched.h"
#include "offload/steps/saved_step.h"
#include "streams/base/mutex.h"

namespace ebb {

class SavedStorage;

// What saved storages have on the device and can do without: copies that have been prefetched, in the order in which
// they were started, as far as backward has yet to ask for them; and storages that the policy has kept, in the order of
// their saves. Backward usually needs the first saved last.
//
// Threads: every member may be called from any thread. The lock is held over nothing but the lists.
class EvictionQueue {
 public:
  using Id = std::uint64_t;

  struct Copy {
    const BackwardCount* thread;  // of the step's; only to compare
    std::weak_ptr<SavedStep> step;
    std::weak_ptr<SavedStorage> storage;
    std::weak_ptr<Fetched> fetched;
  };

  // `stream`: the stream that made the bytes.
  struct Kept {
    Id id;
    std::shared_ptr<SavedStorage> storage;
    c10::Stream stream;
  };

  // `fetched`: lives at least until backward has asked for the copy.
  void add_copy(const std::shared_ptr<SavedStep>& step, std::weak_ptr<SavedStorage> storage,
                std::weak_ptr<Fetched> fetched);

  // Remove copies and return them: those of a step, those of the steps of a thread, and the copy that was started last.
  [[nodiscard]] std::vector<Copy> take_copies_of(const std::shared_ptr<SavedStep>& step);
  [[nodiscard]] std::vector<Copy> take_copies_of(const BackwardCount& thread);
  [[nodiscard]] std::vector<Copy> take_last_copy();

  [[nodiscard]] Id add_kept(std::weak_ptr<SavedStorage> storage, c10::Stream stream);
  void remove_kept(Id id) noexcept;

  // The first storage that was added as `from` or later; nullopt for none.
  [[nodiscard]] std::optional<Kept> first_kept(Id from);

 private:
  struct KeptEntry {
    std::weak_ptr<SavedStorage> storage;
    c10::Stream stream;
  };

  template <typename Which>
  [[nodiscard]] std::vector<Copy> take(const Which& which);

  Mutex mutex_;
  std::deque<Copy> copies_ EBB_GUARDED_BY(mutex_);  // some have been asked for, or have ended
  std::size_t next_cleaning_ EBB_GUARDED_BY(mutex_) = 64;
  std::map<Id, KeptEntry> kept_ EBB_GUARDED_BY(mutex_);
  Id next_id_ EBB_GUARDED_BY(mutex_) = 0;
};

}  // namespace ebb

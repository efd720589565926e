#pragma once

#include <cstdint>
#include <memory>
#include <optional>

#include <c10/core/Storage.h>
#include <c10/core/Stream.h>
#include <c10/core/TensorImpl.h>

#include "offload/accounts/gauge.h"
#include "offload/residency/tiered_storage.h"
#include "offload/steps/saved_step.h"

namespace ebb {

class StepRecorder;
class Steps;

// The bytes that one or more saves share, in one version, and the uses that backward makes of the bytes. A SavedStorage
// lives as long as the saves.
//
// Note [Pending uses]
// Autograd destroys a save when its node has run, but with retain_graph it may unpack the save again. A fetched copy is
// needed until each of the storage's saves has been unpacked once since the fetch. Such a round of unpacks then ends,
// the copy is released, and every save is pending again. A repeated unpack within one backward pass (Note [Asked for
// again]) is no use of its own: the repetition ends no round, and the step is not told, because it would take the
// repetition for a second pass over the graph.
//
// Threads: as TieredStorage.
class SavedStorage final : public TieredStorage {
 public:
  // One save's share in the storage. Destroyed with the save.
  class Use {
   public:
    explicit Use(std::shared_ptr<SavedStorage> storage);
    ~Use();
    Use(const Use&) = delete;
    Use& operator=(const Use&) = delete;

    // Returns the bytes on the device, ready for work on the calling thread's current stream, and prefetches the
    // storages that are expected next. Throws c10::OutOfMemoryError, or the error that a copy failed with; the caller
    // may then call get() again. Throws c10::Error in a forked child.
    [[nodiscard]] c10::Storage get();

    [[nodiscard]] const std::shared_ptr<SavedStorage>& storage() const { return storage_; }

   private:
    friend class SavedStorage;
    const std::shared_ptr<SavedStorage> storage_;
    // The round in which this use last got the bytes, and the backward pass that got them, as LibTorch numbers backward
    // passes; -1 outside of any backward. Guarded by the storage's mutex.
    std::uint64_t seen_ = 0;
    int seen_by_ = -1;
  };

  // `steps` must live as long as `residency`.
  SavedStorage(std::shared_ptr<Residency> residency, Steps& steps, std::shared_ptr<SavedStep> step, c10::Storage source,
               c10::VariableVersion version);
  ~SavedStorage() override;

  // Sets the storage's ordinal, the recorder of its step (null for none), and the index that the recorder gave it.
  // Called before any other member.
  void enter_step(std::uint32_t ordinal, std::shared_ptr<StepRecorder> recorder, std::uint32_t index_in_record);

  // Tells the recorder that the storage is neither offloaded nor dropped, for now.
  void stays();

  // The storage's index in this recorder's record; nullopt if the storage is not recorded, or by another recorder.
  [[nodiscard]] std::optional<std::uint32_t> index_in(const StepRecorder& recorder) const;

  // As TieredStorage::offload, inside a ClockPause of the recorded step.
  void offload(Block block, c10::Stream stream) override;

 private:
  [[nodiscard]] c10::Storage get(Use& use);
  [[nodiscard]] c10::Storage get_on(c10::Stream stream, Use& use);
  [[nodiscard]] c10::Storage run(Recipe& recipe) override;
  bool mark_used(Use& use, const c10::Storage& storage, c10::Stream stream);
  [[nodiscard]] DeviceCopies end_round_locked() noexcept EBB_REQUIRES(mutex_);
  void leaves_locked(c10::Stream stream, Leaves when) EBB_REQUIRES(mutex_) override;
  [[nodiscard]] std::uint64_t stash_limit_bytes() const override;

  Steps& steps_;
  const std::shared_ptr<SavedStep> step_;
  const c10::VariableVersion version_;              // kept alive for VersionId
  std::uint32_t ordinal_ = SavedStep::kNotPlanned;  // this and the next two are written once, under mutex_
  std::uint32_t index_in_record_ = 0;
  std::shared_ptr<StepRecorder> recorder_;
  const Gauge::Lease if_kept_;

  std::optional<SavedStep::Id> step_id_;                 // written once, under mutex_, when a copy out begins
  std::uint64_t round_ EBB_GUARDED_BY(mutex_) = 1;       // Note [Pending uses]
  std::uint64_t told_round_ EBB_GUARDED_BY(mutex_) = 0;  // the last round that the step has heard of
  std::size_t uses_ EBB_GUARDED_BY(mutex_) = 0;
  std::size_t pending_ EBB_GUARDED_BY(mutex_) = 0;  // uses that have not got the bytes in this round
};

}  // namespace ebb

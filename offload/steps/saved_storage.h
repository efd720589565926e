#pragma once

#include <cstdint>
#include <memory>
#include <optional>

#include <c10/core/Storage.h>
#include <c10/core/Stream.h>
#include <c10/core/TensorImpl.h>

#include "offload/report/gauge.h"
#include "offload/residency/tiered_storage.h"
#include "offload/steps/saved_step.h"

namespace ebb {

class StepRecorder;
class Steps;

// The bytes that one or more saves share, in one version, and the uses that backward makes of them. Lives as long as
// the saves.
//
// Note [Pending uses]
// Autograd destroys a save when its node has run, but with retain_graph it may unpack it again. A fetched copy is
// needed until each of the storage's saves has been unpacked once since the fetch; then every save is pending again.
// A repetition within one backward pass (Note [Asked for again]) is no use of its own: it ends no round, and the step,
// which would take it for a second pass over the graph, hears nothing of it.
//
// Threads: as TieredStorage.
class SavedStorage final : public TieredStorage {
 public:
  // One save's share. Destroyed with the save.
  class Use {
   public:
    explicit Use(std::shared_ptr<SavedStorage> storage);
    ~Use();
    Use(const Use&) = delete;
    Use& operator=(const Use&) = delete;

    // The bytes on the device, ready for work on the calling thread's current stream; prefetches what comes next.
    // Throws c10::OutOfMemoryError, or what a copy failed with; it may then be called again. Throws c10::Error in a
    // forked child.
    [[nodiscard]] c10::Storage get();

    [[nodiscard]] const std::shared_ptr<SavedStorage>& storage() const { return storage_; }

   private:
    friend class SavedStorage;
    const std::shared_ptr<SavedStorage> storage_;
    // The round in which this use last got the bytes, and the backward pass that got them, as LibTorch numbers passes;
    // -1 outside of any. Guarded by the storage's mutex.
    std::uint64_t seen_ = 0;
    int seen_by_ = -1;
  };

  // `steps` must live as long as `residency`.
  SavedStorage(std::shared_ptr<Residency> residency, Steps& steps, std::shared_ptr<SavedStep> step, c10::Storage source,
               c10::VariableVersion version);
  ~SavedStorage() override;

  // Its place among the step's candidates, and what the step is recorded by, or null. Before anything else is called.
  void enter_step(std::uint32_t ordinal, std::shared_ptr<StepRecorder> recorder, std::uint32_t index_in_record);

  // It is neither offloaded nor dropped, for now.
  void stays();

  // Where it is in that record; nullopt if it is not recorded, or by another one.
  [[nodiscard]] std::optional<std::uint32_t> index_in(const StepRecorder& recorder) const;

  // As TieredStorage::offload; the time that this takes is none of the recorded step's.
  void offload(Block block, c10::Stream stream) override;

  // Throws c10::Error in a forked child.
  void check_process() const;

  // Stands for the bytes in tensors that only carry sizes and flags.
  [[nodiscard]] const c10::Storage& no_bytes() const;

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
  std::uint32_t ordinal_ = SavedStep::kNotPlanned;  // as the next two: written once, under mutex_
  std::uint32_t index_in_record_ = 0;
  std::shared_ptr<StepRecorder> recorder_;
  const Gauge::Lease if_kept_;

  std::optional<SavedStep::Id> step_id_;            // written once, under mutex_, when the bytes leave in a copy out
  std::uint64_t round_ EBB_GUARDED_BY(mutex_) = 1;  // Note [Pending uses]
  std::uint64_t told_round_ EBB_GUARDED_BY(mutex_) = 0;  // the last round of which the step has been told
  std::size_t uses_ EBB_GUARDED_BY(mutex_) = 0;
  std::size_t pending_ EBB_GUARDED_BY(mutex_) = 0;  // uses that have not got the bytes in this round
};

}  // namespace ebb

#include "offload/cache/home_block.h"

#include "streams/base/after.h"
#include "streams/base/wait_point.h"

namespace ebb {

// The copy reads what the stream has computed (R1), and writes where an earlier owner's copies may still be reading or
// writing (R3, R7).
void HomeBlock::copy_out(const void* from, c10::Stream stream) {
  tier_->made(stream, from, block_.size());
  block_.prepare_gate();  // nothing may fail once the copy has started
  After after(WaitPoint::kOutAfterCompute, stream);
  after.add(WaitPoint::kOutAfterBlockUsers, block_.gates());
  out_ = tier_->copy_out(block_, from, after);
  block_.gate(WaitPoint::kOutGatesBlock, out_);
}

// The host may have freed the memory while the stream still uses it (R5), and the copy out may still be writing to the
// block (R2).
void HomeBlock::copy_in(void* to, c10::Stream stream) {
  block_.prepare_gate();
  After after(WaitPoint::kInAfterMemory, stream);
  after.add(WaitPoint::kInAfterOut, out_);
  in_ = tier_->copy_in(to, block_, after);
  block_.gate(WaitPoint::kInGatesBlock, in_);
}

}  // namespace ebb

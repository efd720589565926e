#include "streams/base/block.h"

#include <algorithm>
#include <utility>

#include <c10/util/Exception.h>

#include "streams/base/block_pool.h"

namespace ebb {

Block::Block(std::shared_ptr<BlockPool> pool, std::uint64_t address, std::size_t size, std::vector<Ticket> gates)
    : pool_(std::move(pool)), address_(address), size_(size), gates_(std::move(gates)) {}

void* Block::data() const {
  TORCH_INTERNAL_ASSERT(pool_->is_memory());
  return reinterpret_cast<void*>(address_);
}

void Block::prepare_gate() {
  std::erase_if(gates_, is_done);  // or a graph that is used repeatedly would gather a ticket for each use
  gates_.reserve(std::max<std::size_t>(2, gates_.size() + 1));  // the copy out and the copy in, usually
}

void Block::gate(WaitPoint why, Ticket ticket) {
  prepare_gate();
  if (ticket != nullptr && in_force(why) && std::find(gates_.begin(), gates_.end(), ticket) == gates_.end()) {
    gates_.push_back(std::move(ticket));
  }
}

void Block::give_back() noexcept { pool_->release(address_, size_, std::move(gates_)); }

}  // namespace ebb

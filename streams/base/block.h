#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "streams/base/ticket.h"
#include "streams/base/wait_point.h"

namespace ebb {

class BlockPool;

// A lease of exactly `size()` bytes of a pool: host memory, or a range of the spill file. The
// destructor returns the bytes to the pool with their gates: the next lease of any of these bytes must wait for every
// gate that is not done.
//
// Threads: one owner at a time; the pool behind it may be used from any thread.
class Block {
 public:
  Block(std::shared_ptr<BlockPool> pool, std::uint64_t address, std::size_t size, std::vector<Ticket> gates);
  Block(Block&& other) noexcept = default;
  Block& operator=(Block&& other) noexcept {
    Block taken(std::move(other));  // gives back what this has had
    std::swap(pool_, taken.pool_);
    std::swap(address_, taken.address_);
    std::swap(size_, taken.size_);
    std::swap(gates_, taken.gates_);
    return *this;
  }
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;
  ~Block() {
    if (pool_ != nullptr) {
      give_back();
    }
  }

  // A pointer's value for host memory, an offset in bytes for a file; and the pointer, which a file's block has not.
  [[nodiscard]] std::uint64_t address() const { return address_; }
  [[nodiscard]] void* data() const;
  [[nodiscard]] std::size_t size() const { return size_; }

  // The tickets of those who still use these bytes: the next writer waits for all of them first (R3 in docs/design.md).
  [[nodiscard]] const std::vector<Ticket>& gates() const { return gates_; }

  // Adds a reader or writer that must be done before these bytes are leased to somebody else. Forgets gates that are
  // done. Does not throw right after prepare_gate().
  void gate(WaitPoint why, Ticket ticket);
  void prepare_gate();

 private:
  void give_back() noexcept;

  std::shared_ptr<BlockPool> pool_;  // null when moved from
  std::uint64_t address_;
  std::size_t size_;
  std::vector<Ticket> gates_;
};

}  // namespace ebb

#pragma once

#include <cstdint>
#include <memory>

#include "policy/everything.h"
#include "policy/wrapper.h"

namespace ebb {

// The smallest storage that is worth a copy. Measured on an H200 over PCIe gen5 x16 (bench/results/h200/link.json):
// besides its bytes a copy costs the link 2 to 3 us, and the host 2 us. So copies one after another reach 36 of the
// link's 55 GB/s at 256 KiB each, and 48 GB/s at 1 MiB each. Batches make smaller copies worth while for the link, but
// not for the host. Little is lost by keeping smaller storages: in a Llama-3-8B layer the saves below 1 MiB are 10 MB
// of 13 GB.
inline constexpr std::uint64_t kDefaultMinimumBytes = 1 << 20;

// Keeps storages smaller than `bytes`.
class MinimumSize final : public Wrapper {
 public:
  MinimumSize(std::uint64_t bytes, std::shared_ptr<Policy> inner);
  [[nodiscard]] Decision decide(const Candidate& candidate) override;
  [[nodiscard]] std::uint64_t least_bytes() const override { return bytes_; }

 private:
  const std::uint64_t bytes_;
};

// Throws std::invalid_argument if `inner` is null or `bytes` is over 2^56.
[[nodiscard]] std::shared_ptr<Policy> minimum_size(std::uint64_t bytes = kDefaultMinimumBytes,
                                                   std::shared_ptr<Policy> inner = offload_everything());

}  // namespace ebb

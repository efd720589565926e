#pragma once

#include <cstddef>
#include <memory>

#include "streams/base/tier.h"

namespace ebb {

// `tier` with an observer in between, which tells HappensBefore of all that an offloader does with the tier. Where this
// file is linked, every offloader's tier is wrapped so (decorated).
//
// Threads: this function and those below may be called from any thread.
[[nodiscard]] std::shared_ptr<Tier> checked(std::shared_ptr<Tier> tier);

// The host frees memory that no tier gave.
void observe_freed(const void* data, std::size_t bytes) noexcept;

// Memory goes back to the system: what comes at this address is other memory.
void observe_gone(const void* data, std::size_t bytes) noexcept;

}  // namespace ebb

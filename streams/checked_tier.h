#pragma once

#include <memory>

#include <c10/core/Stream.h>

#include "streams/tier.h"

namespace ebb {

// What an offloader does with a tier. In builds with EBB_CHECKED, HappensBefore is told of all of it; in every other
// build these calls are nothing.
//
// Threads: any.
#ifdef EBB_CHECKED

// `tier` with an observer in between.
[[nodiscard]] std::shared_ptr<Tier> checked(std::shared_ptr<Tier> tier);

// The work given to `stream` so far has written these bytes of device memory, or later work of it will read them.
// `tier` is what `checked` returned.
void observe_made(Tier& tier, c10::Stream stream, const void* data, std::size_t bytes);
void observe_use(Tier& tier, c10::Stream stream, const void* data, std::size_t bytes);

// The host frees memory that no tier gave.
void observe_freed(const void* data, std::size_t bytes) noexcept;

// Memory goes back to the system: what comes at this address is other memory.
void observe_gone(const void* data, std::size_t bytes) noexcept;

#else

[[nodiscard]] inline std::shared_ptr<Tier> checked(std::shared_ptr<Tier> tier) { return tier; }
inline void observe_made(Tier& /*tier*/, c10::Stream /*stream*/, const void* /*data*/, std::size_t /*bytes*/) {}
inline void observe_use(Tier& /*tier*/, c10::Stream /*stream*/, const void* /*data*/, std::size_t /*bytes*/) {}

#endif

}  // namespace ebb

#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "streams/base/ticket.h"

namespace ebb {

class Trace;

enum class IoKind : std::uint8_t { kRead, kWrite };

// One transfer between memory and the spill file.
struct IoRequest {
  IoKind kind;

  // A multiple of kPageBytes. The request owns the file's bytes up to the end of the last page that it touches: a write
  // may fill the rest of that page with zeros.
  std::uint64_t file_offset;

  // Any alignment. A write only reads it. Valid until the request's ticket is done; no byte beyond `bytes` is touched.
  void* memory;
  std::size_t bytes;  // at least 1

  // The request starts when all of these tickets are done. If a ticket failed, a read fails with that ticket's error.
  std::vector<Ticket> after;
  Trace* trace = nullptr;  // gets a span from the first byte to the last, if there is one; must outlive the request
};

}  // namespace ebb

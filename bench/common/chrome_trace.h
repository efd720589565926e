#pragma once

#include <string>
#include <vector>

#include "streams/base/trace_span.h"

namespace ebb {

// The spans as a Chrome trace in JSON, which Perfetto (ui.perfetto.dev) opens: rows for the compute stream, for each
// lane (several rows where copies or stalls overlap) and for each thread of the host. Times start with the earliest
// span. Format: "Trace Event Format", complete events, of the Chromium project.
[[nodiscard]] std::string chrome_trace(std::vector<TraceSpan> spans);

}  // namespace ebb

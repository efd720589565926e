#pragma once

#include <string>
#include <vector>

#include "streams/trace_span.h"

namespace ebb {

// The spans as a Chrome trace in JSON, which Perfetto (ui.perfetto.dev) opens: a row for the compute stream, one for
// each lane, one for each thread of the host. Times start with the earliest span. Format: "Trace Event Format",
// complete events, of the Chromium project.
[[nodiscard]] std::string chrome_trace(const std::vector<TraceSpan>& spans);

}  // namespace ebb

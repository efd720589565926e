#pragma once

#include <cstdint>
#include <string>

#include <c10/core/Device.h>

namespace ebb {

class Llama;

// `bytes` bytes that the model makes up after `prompt` (not empty), which is not part of the result: each byte is drawn
// from the 40 likeliest at temperature 0.8. Equal weights and seeds give equal bytes.
std::string sample_text(Llama& model, const std::string& prompt, std::int64_t bytes, std::uint64_t seed,
                        c10::Device device);

// Bytes for a terminal: each byte that is neither printable ASCII nor a line's end becomes '.'.
std::string printable(const std::string& bytes);

}  // namespace ebb

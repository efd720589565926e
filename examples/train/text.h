#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

namespace ebb {

// The bytes to train on, and their source.
struct Text {
  std::string bytes;
  std::filesystem::path source;
  std::uint64_t files = 0;
};

// The most text that is read; the rest of a larger source is left.
inline constexpr std::uint64_t kMostTextBytes = std::uint64_t{64} << 20;

// Reads a file, or the regular files under a folder in the order of their paths, one after another. `extension` (".h")
// keeps only files that end in it; "" keeps all. Throws std::runtime_error that names the path if the path does
// not exist, cannot be read or holds no text.
Text load_text(const std::filesystem::path& source, const std::string& extension = "");

// The text at $EBB_TEXT if that is set, else the C++ headers of the LibTorch that this program runs on.
Text load_default_text();

}  // namespace ebb

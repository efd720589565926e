#include "examples/train/text.h"

#include <link.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <stdexcept>
#include <string_view>
#include <system_error>

namespace ebb {
namespace {

namespace fs = std::filesystem;

[[noreturn]] void fail(const std::string& what, const fs::path& path, const std::string& why) {
  throw std::runtime_error(what + " " + path.string() + ": " + why);
}

void append_file(const fs::path& path, std::string& bytes) {
  std::ifstream in(path, std::ios::binary);
  if (!in) {
    fail("cannot read text", path, std::strerror(errno));
  }
  std::array<char, std::size_t{64} << 10> chunk{};
  do {
    const auto room = std::min<std::uint64_t>(chunk.size(), kMostTextBytes - bytes.size());
    in.read(chunk.data(), static_cast<std::streamsize>(room));
    bytes.append(chunk.data(), static_cast<std::size_t>(in.gcount()));
  } while (in && bytes.size() < kMostTextBytes);
  if (in.bad()) {
    fail("cannot read text", path, std::strerror(errno));
  }
}

std::vector<fs::path> files_under(const fs::path& folder, const std::string& extension) {
  std::vector<fs::path> files;
  std::error_code error;
  auto entry = fs::recursive_directory_iterator(folder, error);
  for (; !error && entry != fs::recursive_directory_iterator(); entry.increment(error)) {
    if (entry->is_regular_file() && (extension.empty() || entry->path().extension() == extension)) {
      files.push_back(entry->path());
    }
  }
  if (error) {
    fail("cannot read text folder", folder, error.message());
  }
  std::sort(files.begin(), files.end());
  return files;
}

// Asks the loader where LibTorch is, so that the answer is right however the program was built.
fs::path libtorch_include_folder() {
  fs::path found;
  dl_iterate_phdr(
      [](dl_phdr_info* info, std::size_t, void* out) {
        const fs::path path = info->dlpi_name;
        if (path.filename() != "libtorch_cpu.so") {
          return 0;
        }
        *static_cast<fs::path*>(out) = path;
        return 1;
      },
      &found);
  return found.empty() ? found : fs::weakly_canonical(found.parent_path() / ".." / "include");
}

}  // namespace

Text load_text(const fs::path& source, const std::string& extension) {
  std::error_code error;
  const auto status = fs::status(source, error);
  if (status.type() == fs::file_type::none) {
    fail("cannot read text", source, error.message());
  }
  if (!fs::exists(status)) {
    fail("no text found at", source, "no such file or folder");
  }
  const auto files = fs::is_directory(status) ? files_under(source, extension) : std::vector<fs::path>{source};
  Text text;
  text.source = source;
  for (const auto& file : files) {
    if (text.bytes.size() == kMostTextBytes) {
      break;
    }
    append_file(file, text.bytes);
    ++text.files;
  }
  if (text.bytes.empty()) {
    fail("no text found at", source, text.files == 0 ? "the folder has no files" : "it is empty");
  }
  return text;
}

Text load_default_text() {
  if (const char* path = std::getenv("EBB_TEXT")) {
    return load_text(path);
  }
  const auto folder = libtorch_include_folder();
  if (folder.empty()) {
    throw std::runtime_error("no text found: LibTorch's headers are not beside its libraries; give --text");
  }
  return load_text(folder, ".h");
}

}  // namespace ebb

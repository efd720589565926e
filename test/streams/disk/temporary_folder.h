#pragma once

#include <cstdlib>
#include <filesystem>
#include <string>
#include <system_error>

namespace ebb {

// An empty folder on a real disk (/tmp may be memory), for its owner only, removed with what is in it.
class TemporaryFolder {
 public:
  TemporaryFolder() {
    std::string name = "/var/tmp/ebb-test-XXXXXX";
    path_ = ::mkdtemp(name.data());
  }
  ~TemporaryFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;
  [[nodiscard]] const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
};

}  // namespace ebb

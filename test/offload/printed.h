#pragma once

#include <unistd.h>

#include <cstdio>
#include <string>
#include <utility>

namespace ebb {

// What the process prints from here on.
class Printed {
 public:
  Printed() {
    std::fflush(stdout);
    dup2(fileno(file_), STDOUT_FILENO);
  }
  ~Printed() { (void)take(); }
  Printed(const Printed&) = delete;
  Printed& operator=(const Printed&) = delete;

  // Ends it.
  std::string take() {
    if (before_ < 0) {
      return "";
    }
    std::fflush(stdout);
    dup2(before_, STDOUT_FILENO);
    close(std::exchange(before_, -1));
    std::string text(static_cast<std::size_t>(std::ftell(file_)), '\0');
    std::rewind(file_);
    text.resize(std::fread(text.data(), 1, text.size(), file_));
    std::fclose(file_);
    return text;
  }

 private:
  std::FILE* const file_ = std::tmpfile();
  int before_ = dup(STDOUT_FILENO);
};

}  // namespace ebb

#include "test/train/tiny_run.h"

#include <array>
#include <utility>

namespace ebb {
namespace {

// Every word differs, so that a wrong crop shows in the loss.
std::string tiny_text() {
  std::string text;
  for (int i = 0; i < 500; ++i) {
    text += "line " + std::to_string(i * i) + " of the text;\n";
  }
  return text;
}

constexpr std::array<std::pair<const char*, const char*>, 11> kTiny = {{{"--device", "cpu"},
                                                                        {"--steps", "4"},
                                                                        {"--batch", "2"},
                                                                        {"--seq", "32"},
                                                                        {"--dim", "32"},
                                                                        {"--layers", "2"},
                                                                        {"--heads", "4"},
                                                                        {"--kv-heads", "2"},
                                                                        {"--ffn", "64"},
                                                                        {"--sample", "0"},
                                                                        {"--minimum", "1KiB"}}};

}  // namespace

TinyRun::TinyRun() { write_file(file("text"), tiny_text()); }

Outcome TinyRun::operator()(const std::string& flags, const std::string& before) const {
  std::string all = flags;
  for (const auto& [flag, value] : kTiny) {
    if ((" " + flags).find(" " + std::string(flag) + " ") == std::string::npos) {
      all += std::string(" ") + flag + " " + value;
    }
  }
  if (flags.find("--text") == std::string::npos) {
    all += " --text " + file("text");
  }
  return run_program("train", all, before);
}

}  // namespace ebb

#include "examples/train/text.h"

#include <cstdlib>
#include <filesystem>

#include <catch2/catch.hpp>

#include "test/train/program.h"

namespace ebb {

TEST_CASE("a folder's files are read in the order of their paths, whatever order they were made in", "[train]") {
  const TempFolder folder;
  write_file(folder.file("b.h"), "two ");
  write_file(folder.file("c.txt"), "four");
  std::filesystem::create_directory(folder.file("ba"));
  write_file(folder.file("ba/x.h"), "three ");
  write_file(folder.file("a.h"), "one ");
  const auto all = load_text(folder.file("."));
  CHECK(all.bytes == "one two three four");
  CHECK(all.files == 4);
  CHECK(load_text(folder.file("."), ".h").bytes == "one two three ");
}

TEST_CASE("a file is read whole, with every byte value", "[train]") {
  const TempFolder folder;
  std::string bytes;
  for (int i = 0; i < 100'000; ++i) {
    bytes.push_back(static_cast<char>(i * 7));
  }
  write_file(folder.file("text"), bytes);
  CHECK(load_text(folder.file("text")).bytes == bytes);
}

TEST_CASE("text beyond the most that is read is left", "[train]") {
  const TempFolder folder;
  write_file(folder.file("a"), std::string(kMostTextBytes - 1, 'a'));
  write_file(folder.file("b"), "bbb");
  const auto text = load_text(folder.file("."));
  CHECK(text.bytes.size() == kMostTextBytes);
  CHECK(text.bytes.back() == 'b');
}

TEST_CASE("the default text is what EBB_TEXT names", "[train]") {
  const TempFolder folder;
  write_file(folder.file("text"), "from the environment");
  setenv("EBB_TEXT", folder.file("text").c_str(), 1);
  CHECK(load_default_text().bytes == "from the environment");
  unsetenv("EBB_TEXT");
}

}  // namespace ebb

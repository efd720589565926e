#include "examples/train/tensor_file.h"

#include <cstring>
#include <stdexcept>
#include <string>
#include <string_view>

#include <catch2/catch.hpp>
#include <xxhash.h>

#include "examples/train/mapped_file.h"
#include "test/train/program.h"

namespace ebb {
namespace {

std::span<const std::byte> bytes_of(std::string_view text) { return std::as_bytes(std::span(text)); }

// A file with this header, and a checksum that is right whatever the header says.
std::string file_with(std::string_view header, std::string_view data = "", std::uint64_t length_more = 0) {
  const std::uint64_t length = header.size() + length_more;
  std::string file(sizeof(length), '\0');
  std::memcpy(file.data(), &length, sizeof(length));
  file.append(header).append(data);
  XXH64_canonical_t checksum;
  XXH64_canonicalFromHash(&checksum, XXH3_64bits(file.data(), file.size()));
  return file.append(reinterpret_cast<const char*>(&checksum), sizeof(checksum));
}

// The same with one entry, which claims to be "a", before the checksum's.
std::string file_with_entry(const std::string& entry, std::string_view data) {
  const std::string begin = std::to_string(data.size());
  const std::string end = std::to_string(data.size() + sizeof(XXH64_canonical_t));
  return file_with(
      R"({"a":)" + entry + R"(,"xxh3":{"dtype":"U8","shape":[8],"data_offsets":[)" + begin + "," + end + "]}}", data);
}

void check_refused(std::string_view file, const std::string& why) {
  INFO(file);
  CHECK_THROWS_MATCHES(parse_tensor_file(bytes_of(file)), BadTensorFile, Catch::Matchers::Message(why));
}

// What TensorFileWriter wrote, as a string.
std::string written(const TempFolder& folder) {
  TensorFileWriter out(folder.file("file"), {{"dim", "32"}},
                       {{"m", "F32", {2, 3}}, {"s", "BF16", {}}, {"e", "I64", {0}}});
  out.append(bytes_of("24 bytes of matrix data."));
  out.append(bytes_of("xy"));
  out.commit();
  return read_file(folder.file("file"));
}

}  // namespace

TEST_CASE("a tensor file gives back its texts and every tensor's type, sizes and bytes", "[train]") {
  const TempFolder folder;
  written(folder);
  const MappedFile mapped(folder.file("file"));
  const TensorFile file = parse_tensor_file(mapped.bytes());
  CHECK(file.texts == std::map<std::string, std::string>{{"dim", "32"}});
  REQUIRE(file.tensors.size() == 3);
  const TensorBytes& matrix = file.tensors.at("m");
  CHECK(matrix.dtype == "F32");
  CHECK(matrix.shape == std::vector<std::int64_t>{2, 3});
  CHECK(std::string_view(reinterpret_cast<const char*>(matrix.bytes.data()), matrix.bytes.size()) ==
        "24 bytes of matrix data.");
  CHECK(file.tensors.at("s").shape.empty());
  CHECK(file.tensors.at("s").bytes.size() == 2);
  CHECK(file.tensors.at("e").bytes.empty());
}

TEST_CASE("one bit turned over anywhere in a tensor file is found, and so is every length cut off", "[train]") {
  const TempFolder folder;
  const std::string whole = written(folder);
  REQUIRE_NOTHROW(parse_tensor_file(bytes_of(whole)));
  std::size_t found = 0;
  for (std::size_t bit = 0; bit < 8 * whole.size(); ++bit) {
    std::string damaged = whole;
    damaged[bit / 8] = static_cast<char>(damaged[bit / 8] ^ (1 << (bit % 8)));
    try {
      (void)parse_tensor_file(bytes_of(damaged));
    } catch (const BadTensorFile&) {
      ++found;
    }
  }
  CHECK(found == 8 * whole.size());
  for (std::size_t length = 0; length < whole.size(); ++length) {
    CHECK_THROWS_AS(parse_tensor_file(bytes_of(std::string_view(whole).substr(0, length))), BadTensorFile);
  }
}

// Each with a checksum that is right: only what is said about the sizes is wrong.
TEST_CASE("a header whose sizes lie is refused before anything is allocated or read for it", "[train]") {
  check_refused(file_with("{}", "", std::uint64_t{1} << 60), "its header is longer than the file");
  check_refused(file_with("{}"), "it does not end in its checksum");
  check_refused(file_with("[]"), "its header is not a JSON object");
  check_refused(file_with(std::string(100'000, '[')), "its header is not a JSON object");
  const auto entry = [](const char* shape, const char* place) {
    return R"({"dtype":"F32","shape":)" + std::string(shape) + R"(,"data_offsets":)" + place + "}";
  };
  REQUIRE_NOTHROW(parse_tensor_file(bytes_of(file_with_entry(entry("[2]", "[0,8]"), "8 bytes."))));
  check_refused(file_with_entry(entry("[3]", "[0,8]"), "8 bytes."),
                "its header has a tensor of another size than its bytes");
  check_refused(file_with_entry(entry("[4611686018427387904,4]", "[0,0]"), ""),
                "its header has a tensor of another size than its bytes");
  check_refused(file_with_entry(entry("[18446744073709551615]", "[0,8]"), "8 bytes."),
                "its header has a size that is too large");
  check_refused(file_with_entry(entry("[-2]", "[0,8]"), "8 bytes."), "its header has a size that is no number");
  check_refused(file_with_entry(entry("[8]", "[0,32]"), "8 bytes."), "its header has a tensor outside of the file");
  check_refused(file_with_entry(entry("[2]", "[8,0]"), "8 bytes."), "its header has a tensor outside of the file");
  check_refused(file_with_entry(R"({"dtype":"F32"})", ""), "its header has a tensor without a dtype or a place");
}

TEST_CASE("a tensor file is not committed with more or fewer bytes than its tensors have", "[train]") {
  const TempFolder folder;
  TensorFileWriter out(folder.file("file"), {}, {{"a", "F32", {2}}});
  CHECK_THROWS_AS(out.append(bytes_of("nine byte")), std::logic_error);
  out.append(bytes_of("seven b"));
  CHECK_THROWS_AS(out.commit(), std::logic_error);
  CHECK_FALSE(std::filesystem::exists(folder.file("file")));
}

}  // namespace ebb

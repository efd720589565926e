#include "examples/train/tensor_file.h"

#include <algorithm>
#include <vector>

#include <xxhash.h>

#include "test/fuzz/targets.h"

namespace ebb {
namespace {

void parse(std::span<const std::byte> bytes) {
  TensorFile file;
  try {
    file = parse_tensor_file(bytes);
  } catch (const BadTensorFile& error) {
    require_of_parser(*error.what() != '\0', "an error without a text");
    return;
  }
  for (const auto& [name, tensor] : file.tensors) {
    const auto* const begin = tensor.bytes.data();
    require_of_parser(begin >= bytes.data() && tensor.bytes.size() <= bytes.size() - (begin - bytes.data()),
                      "a tensor outside of the file");
    require_of_parser(std::none_of(tensor.shape.begin(), tensor.shape.end(), [](auto size) { return size < 0; }),
                      "a negative size");
  }
}

}  // namespace

void fuzz_tensor_file(FuzzInput input) {
  const auto bytes = std::as_bytes(input);
  parse(bytes);
  // No mutation gets past the checksum, so the parser behind it would never be reached.
  std::vector<std::byte> mended(bytes.begin(), bytes.end());
  XXH64_canonical_t checksum;
  if (mended.size() >= sizeof(checksum)) {
    const std::size_t content = mended.size() - sizeof(checksum);
    XXH64_canonicalFromHash(&checksum, XXH3_64bits(mended.data(), content));
    std::copy_n(reinterpret_cast<const std::byte*>(&checksum), sizeof(checksum), mended.data() + content);
    parse(mended);
  }
}

}  // namespace ebb

#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

namespace ebb {

// Note [Checkpoints are not torch::serialize archives]
// A LibTorch archive is a zip file around a pickle, and LibTorch parses it before anything can say that it is damaged.
// A tensor file is checked as a whole by its checksum first, and so a damaged checkpoint is refused with one sentence.
// A tensor file is read in place from a mapping, so memory holds no second copy of the weights, and a file that is
// written appears whole or not at all. The parser needs no LibTorch, so libFuzzer tests it at full speed.

// Named tensors and short texts in one file, in the safetensors format (github.com/huggingface/safetensors): the
// length of a JSON header, the header, the tensors' bytes. Any reader of that format can open the file. Files of this
// program end in a checksum: the last tensor, named kChecksumName, holds the XXH3 (64 bits, most significant byte
// first) of all bytes before it.
inline constexpr const char* kChecksumName = "xxh3";

struct TensorSpec {
  std::string name;
  std::string dtype;  // "F32", "BF16", ...: as the format calls them
  std::vector<std::int64_t> shape;
};

struct TensorBytes {
  std::string dtype;
  std::vector<std::int64_t> shape;
  std::span<const std::byte> bytes;  // dtype and shape together say exactly so many
};

struct TensorFile {
  std::map<std::string, std::string> texts;
  std::map<std::string, TensorBytes> tensors;  // without the checksum
};

class BadTensorFile : public std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Reads a file's bytes, in place: the result points into them. Whatever the bytes say, the parser reads nothing outside
// of them and allocates no more than a fixed multiple of their number. Throws BadTensorFile, with one sentence, for
// bytes that are not in this format or whose checksum does not match.
TensorFile parse_tensor_file(std::span<const std::byte> bytes);

// Writes a file in this format, which appears whole or not at all (examples/common/atomic_file.h has the errors).
class TensorFileWriter {
 public:
  TensorFileWriter(const std::filesystem::path& file, const std::map<std::string, std::string>& texts,
                   const std::vector<TensorSpec>& tensors);
  ~TensorFileWriter();

  // The tensors' bytes, one tensor after another in the order given.
  void append(std::span<const std::byte> bytes);

  // Throws std::logic_error if the bytes are not as many as the tensors have.
  void commit();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace ebb

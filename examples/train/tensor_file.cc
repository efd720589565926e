#include "examples/train/tensor_file.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>
#include <optional>
#include <utility>

#include <nlohmann/json.hpp>
#include <xxhash.h>

#include "examples/common/atomic_file.h"

namespace ebb {
namespace {

using Json = nlohmann::json;

constexpr std::size_t kLengthBytes = 8;  // of the header's length, at the front
constexpr std::size_t kChecksumBytes = sizeof(XXH64_canonical_t);
constexpr std::size_t kAlignment = 8;  // of the tensors' bytes in the file
constexpr const char* kTexts = "__metadata__";
constexpr std::array<std::pair<const char*, std::uint64_t>, 4> kItemBytes = {
    {{"F32", 4}, {"BF16", 2}, {"I64", 8}, {"U8", 1}}};

void require(bool good, const char* why) {
  if (!good) {
    throw BadTensorFile(why);
  }
}

// nullopt for an unknown dtype, a negative size, or more bytes than can be counted.
std::optional<std::uint64_t> bytes_of(const std::string& dtype, const std::vector<std::int64_t>& shape) {
  const auto* const known =
      std::find_if(kItemBytes.begin(), kItemBytes.end(), [&](const auto& item) { return item.first == dtype; });
  if (known == kItemBytes.end()) {
    return std::nullopt;
  }
  std::uint64_t bytes = known->second;
  for (const std::int64_t size : shape) {
    if (size < 0 || __builtin_mul_overflow(bytes, static_cast<std::uint64_t>(size), &bytes)) {
      return std::nullopt;
    }
  }
  return bytes;
}

std::uint64_t get_length(std::span<const std::byte> bytes) {
  std::uint64_t length = 0;
  for (std::size_t i = 0; i < kLengthBytes; ++i) {
    length |= std::to_integer<std::uint64_t>(bytes[i]) << (8 * i);
  }
  return length;
}

std::array<std::byte, kLengthBytes> put_length(std::uint64_t length) {
  std::array<std::byte, kLengthBytes> bytes{};
  for (std::size_t i = 0; i < kLengthBytes; ++i) {
    bytes[i] = static_cast<std::byte>(length >> (8 * i));
  }
  return bytes;
}

// The bytes before the checksum, if that is theirs.
std::span<const std::byte> checked(std::span<const std::byte> bytes) {
  require(bytes.size() >= kLengthBytes + kChecksumBytes, "it is too short");
  const auto content = bytes.first(bytes.size() - kChecksumBytes);
  XXH64_canonical_t stored;
  std::memcpy(&stored, bytes.last(kChecksumBytes).data(), sizeof(stored));
  require(XXH3_64bits(content.data(), content.size()) == XXH64_hashFromCanonical(&stored),
          "its checksum does not match");
  return content;
}

std::uint64_t number(const Json& value) {
  require(value.is_number_unsigned(), "its header has a size that is no number");
  return value.get<std::uint64_t>();
}

std::vector<std::int64_t> shape_of(const Json& entry) {
  const auto shape = entry.find("shape");
  require(shape != entry.end() && shape->is_array(), "its header has a tensor without a shape");
  std::vector<std::int64_t> sizes;
  for (const Json& size : *shape) {
    require(number(size) <= std::numeric_limits<std::int64_t>::max(), "its header has a size that is too large");
    sizes.push_back(static_cast<std::int64_t>(number(size)));
  }
  return sizes;
}

// `data` is all tensors' bytes, the checksum's included.
TensorBytes tensor_of(const Json& entry, std::span<const std::byte> data) {
  require(entry.is_object(), "its header has an entry that is no tensor");
  const auto dtype = entry.find("dtype");
  const auto range = entry.find("data_offsets");
  require(dtype != entry.end() && dtype->is_string() && range != entry.end() && range->is_array() && range->size() == 2,
          "its header has a tensor without a dtype or a place");
  TensorBytes tensor{dtype->get<std::string>(), shape_of(entry), {}};
  const std::uint64_t begin = number((*range)[0]);
  const std::uint64_t end = number((*range)[1]);
  require(begin <= end && end <= data.size(), "its header has a tensor outside of the file");
  require(bytes_of(tensor.dtype, tensor.shape) == end - begin,
          "its header has a tensor of another size than its bytes");
  tensor.bytes = data.subspan(begin, end - begin);
  return tensor;
}

std::map<std::string, std::string> texts_of(const Json& entry) {
  require(entry.is_object(), "its header has texts that are none");
  std::map<std::string, std::string> texts;
  for (const auto& [name, text] : entry.items()) {
    require(text.is_string(), "its header has a text that is none");
    texts[name] = text.get<std::string>();
  }
  return texts;
}

Json entry_of(const TensorSpec& spec, std::uint64_t begin, std::uint64_t bytes) {
  return {{"dtype", spec.dtype}, {"shape", spec.shape}, {"data_offsets", {begin, begin + bytes}}};
}

}  // namespace

TensorFile parse_tensor_file(std::span<const std::byte> bytes) {
  const auto content = checked(bytes);
  const std::uint64_t length = get_length(content);
  require(length <= content.size() - kLengthBytes, "its header is longer than the file");
  const auto text = content.subspan(kLengthBytes, length);
  const auto* const begin = reinterpret_cast<const char*>(text.data());
  const Json header = Json::parse(begin, begin + text.size(), nullptr, /*allow_exceptions=*/false);
  require(header.is_object(), "its header is not a JSON object");

  TensorFile file;
  const auto data = bytes.subspan(kLengthBytes + length);
  for (const auto& [name, entry] : header.items()) {
    if (name == kTexts) {
      file.texts = texts_of(entry);
    } else {
      file.tensors.emplace(name, tensor_of(entry, data));
    }
  }
  const auto checksum = file.tensors.find(kChecksumName);
  require(checksum != file.tensors.end() && checksum->second.bytes.data() == content.data() + content.size() &&
              checksum->second.bytes.size() == kChecksumBytes,
          "it does not end in its checksum");
  file.tensors.erase(checksum);
  return file;
}

struct TensorFileWriter::State {
  struct FreeHash {
    void operator()(XXH3_state_t* hash) const { XXH3_freeState(hash); }
  };

  explicit State(const std::filesystem::path& file) : out(file), hash(XXH3_createState()) {
    if (hash == nullptr) {
      throw std::bad_alloc();
    }
    XXH3_64bits_reset(hash.get());
  }

  void append(const void* data, std::size_t bytes) {
    XXH3_64bits_update(hash.get(), data, bytes);
    out.append(data, bytes);
  }

  AtomicFile out;
  std::unique_ptr<XXH3_state_t, FreeHash> hash;
  std::uint64_t missing = 0;  // bytes of the tensors that are still to come
};

TensorFileWriter::TensorFileWriter(const std::filesystem::path& file, const std::map<std::string, std::string>& texts,
                                   const std::vector<TensorSpec>& tensors)
    : state_(std::make_unique<State>(file)) {
  Json header = {{kTexts, texts}};
  std::uint64_t end = 0;
  for (const TensorSpec& tensor : tensors) {
    const auto bytes = bytes_of(tensor.dtype, tensor.shape);
    if (!bytes || header.contains(tensor.name)) {
      throw std::logic_error("a tensor file takes no " + tensor.name + " of " + tensor.dtype);
    }
    header[tensor.name] = entry_of(tensor, end, *bytes);
    end += *bytes;
  }
  header[kChecksumName] = entry_of({kChecksumName, "U8", {kChecksumBytes}}, end, kChecksumBytes);
  state_->missing = end;

  std::string text = header.dump();
  text.resize((text.size() + kAlignment - 1) / kAlignment * kAlignment, ' ');
  const auto length = put_length(text.size());
  state_->append(length.data(), length.size());
  state_->append(text.data(), text.size());
}

TensorFileWriter::~TensorFileWriter() = default;

void TensorFileWriter::append(std::span<const std::byte> bytes) {
  if (bytes.size() > state_->missing) {
    throw std::logic_error("more bytes than the tensors of the file have");
  }
  state_->missing -= bytes.size();
  state_->append(bytes.data(), bytes.size());
}

void TensorFileWriter::commit() {
  if (state_->missing != 0) {
    throw std::logic_error("fewer bytes than the tensors of the file have");
  }
  XXH64_canonical_t checksum;
  XXH64_canonicalFromHash(&checksum, XXH3_64bits_digest(state_->hash.get()));
  state_->out.append(&checksum, sizeof(checksum));
  state_->out.commit();
}

}  // namespace ebb

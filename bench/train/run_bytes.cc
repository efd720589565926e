#include "bench/train/run_bytes.h"

#include <cstddef>
#include <cstring>
#include <type_traits>

namespace ebb {
namespace {

// Every field of a result, in one order for both directions.
template <typename Result, typename Each>
void for_each_field(Result& result, Each each) {
  each(result.device);
  each(result.losses);
  each(result.step_ms);
  each(result.saved.peak_bytes);
  each(result.saved.timeline);
  each(result.peak_device_bytes);
  each(result.peak_resident_bytes);
  each(result.stats);
}

struct Writer {
  std::string& out;

  template <typename T>
  void operator()(const T& value) {
    if constexpr (std::is_trivially_copyable_v<T>) {
      out.append(reinterpret_cast<const char*>(&value), sizeof(T));
    } else {
      static_assert(std::is_trivially_copyable_v<typename T::value_type>);
      (*this)(value.size());
      out.append(reinterpret_cast<const char*>(value.data()), value.size() * sizeof(typename T::value_type));
    }
  }
};

struct Reader {
  std::string_view& in;

  void take(void* to, std::size_t bytes) {
    if (bytes != 0) {
      std::memcpy(to, in.data(), bytes);
    }
    in.remove_prefix(bytes);
  }

  template <typename T>
  void operator()(T& value) {
    if constexpr (std::is_trivially_copyable_v<T>) {
      take(&value, sizeof(T));
    } else {
      std::size_t count = 0;
      take(&count, sizeof(count));
      value.resize(count);
      take(value.data(), count * sizeof(typename T::value_type));
    }
  }
};

}  // namespace

std::string to_bytes(const RunResult& result) {
  std::string bytes;
  for_each_field(result, Writer{bytes});
  return bytes;
}

RunResult run_result_of(std::string_view bytes) {
  RunResult result;
  for_each_field(result, Reader{bytes});
  return result;
}

}  // namespace ebb

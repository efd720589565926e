#include "offload/recompute/scale_rows.h"

#include <dlfcn.h>

#include <array>
#include <cstdint>
#include <limits>
#include <map>
#include <string>
#include <tuple>
#include <vector>

#include <ATen/ops/empty_like.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>
#include <nvrtc.h>

#include "offload/base/log.h"
#include "streams/base/mutex.h"

namespace ebb {
namespace {

// Conversions use the instructions of which LibTorch's conversions are made.
constexpr const char* kSource = R"(
#if defined(EBB_BFLOAT16)
typedef unsigned short T;
typedef float Acc;
__device__ Acc load(T bits) { return __uint_as_float((unsigned)bits << 16); }
__device__ T store(Acc value) { T bits; asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value)); return bits; }
#elif defined(EBB_HALF)
typedef unsigned short T;
typedef float Acc;
__device__ Acc load(T bits) { Acc value; asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits)); return value; }
__device__ T store(Acc value) { T bits; asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value)); return bits; }
#else
typedef EBB_REAL T;
typedef EBB_REAL Acc;
__device__ Acc load(T value) { return value; }
__device__ T store(Acc value) { return value; }
#endif

__device__ T scaled(T x, Acc rstd, const T* weight, unsigned column) {
  const Acc normalized = rstd * load(x);
  return store(weight == nullptr ? normalized : load(weight[column]) * normalized);
}

// A block for each row.
extern "C" __global__ void scale_rows(const T* x, const Acc* rstd, const T* weight, T* y, unsigned width) {
  const unsigned long long begin = (unsigned long long)blockIdx.x * width;
  for (unsigned i = threadIdx.x; i < width; i += blockDim.x) {
    y[begin + i] = scaled(x[begin + i], rstd[blockIdx.x], weight, i);
  }
}

struct __align__(16) Vector {
  T values[16 / sizeof(T)];
};

// The same where rows are whole vectors. `width` in vectors.
extern "C" __global__ void scale_rows_by_vectors(const Vector* x, const Acc* rstd, const T* weight, Vector* y,
                                                 unsigned width) {
  constexpr unsigned kValues = 16 / sizeof(T);
  const unsigned long long begin = (unsigned long long)blockIdx.x * width;
  const Acc scale = rstd[blockIdx.x];
  for (unsigned i = threadIdx.x; i < width; i += blockDim.x) {
    Vector vector = x[begin + i];
    for (unsigned k = 0; k < kValues; ++k) {
      vector.values[k] = scaled(vector.values[k], scale, weight, i * kValues + k);
    }
    y[begin + i] = vector;
  }
}
)";

constexpr std::size_t kVectorBytes = 16;
constexpr int kThreads = 256;
constexpr int kOldestMajor = 8;  // compute capability; older devices cannot convert to bfloat16

const char* definition(at::ScalarType dtype) {
  switch (dtype) {
    case at::kBFloat16:
      return "-DEBB_BFLOAT16";
    case at::kHalf:
      return "-DEBB_HALF";
    case at::kFloat:
      return "-DEBB_REAL=float";
    case at::kDouble:
      return "-DEBB_REAL=double";
    default:
      return nullptr;
  }
}

// NVRTC, which is loaded at run time, as LibTorch loads it. May be missing.
class Nvrtc {
 public:
  static const Nvrtc& get() {
    static const Nvrtc nvrtc;
    return nvrtc;
  }

  // Machine code for one device's architecture. Empty if the source cannot be compiled.
  [[nodiscard]] std::vector<char> compile(const char* source, const std::string& architecture,
                                          const char* definition) const {
    nvrtcProgram program = nullptr;
    if (library_ == nullptr || create_(&program, source, "scale_rows.cu", 0, nullptr, nullptr) != NVRTC_SUCCESS) {
      return {};
    }
    const std::array<const char*, 2> options{architecture.c_str(), definition};
    std::vector<char> code;
    std::size_t bytes = 0;
    if (compile_(program, options.size(), options.data()) == NVRTC_SUCCESS && size_(program, &bytes) == NVRTC_SUCCESS) {
      code.resize(bytes);
      if (code_(program, code.data()) != NVRTC_SUCCESS) {
        code.clear();
      }
    }
    static_cast<void>(destroy_(&program));
    return code;
  }

 private:
  Nvrtc() : library_(dlopen("libnvrtc.so.13", RTLD_NOW | RTLD_LOCAL)) {
    const bool complete = library_ != nullptr && find(create_, "nvrtcCreateProgram") &&
                          find(compile_, "nvrtcCompileProgram") && find(size_, "nvrtcGetCUBINSize") &&
                          find(code_, "nvrtcGetCUBIN") && find(destroy_, "nvrtcDestroyProgram");
    if (!complete) {
      library_ = nullptr;
    }
  }

  template <typename Function>
  bool find(Function*& function, const char* name) {
    function = reinterpret_cast<Function*>(dlsym(library_, name));
    return function != nullptr;
  }

  void* library_;  // never unloaded
  decltype(nvrtcCreateProgram)* create_ = nullptr;
  decltype(nvrtcCompileProgram)* compile_ = nullptr;
  decltype(nvrtcGetCUBINSize)* size_ = nullptr;
  decltype(nvrtcGetCUBIN)* code_ = nullptr;
  decltype(nvrtcDestroyProgram)* destroy_ = nullptr;
};

struct Kernels {
  cudaKernel_t by_values = nullptr;
  cudaKernel_t by_vectors = nullptr;
};

Kernels make_kernels(int major, int minor, at::ScalarType dtype) {
  const std::string architecture = "--gpu-architecture=sm_" + std::to_string(major) + std::to_string(minor);
  const std::vector<char> code = Nvrtc::get().compile(kSource, architecture, definition(dtype));
  cudaLibrary_t library = nullptr;
  Kernels kernels;
  const auto load = [&] {
    return cudaLibraryLoadData(&library, code.data(), nullptr, nullptr, 0, nullptr, nullptr, 0) == cudaSuccess &&
           cudaLibraryGetKernel(&kernels.by_values, library, "scale_rows") == cudaSuccess &&
           cudaLibraryGetKernel(&kernels.by_vectors, library, "scale_rows_by_vectors") == cudaSuccess;
  };
  if (!code.empty() && load()) {
    return kernels;
  }
  if (!code.empty()) {
    static_cast<void>(cudaGetLastError());  // clears the error of these calls
  }
  log_debug("no kernel for norms on " + architecture + "; they are recomputed by elementwise operations");
  return {};
}

// Null where no kernels can be made.
Kernels kernels_for(c10::Device device, at::ScalarType dtype) {
  static Mutex mutex;
  using Made = std::map<std::tuple<int, int, at::ScalarType>, Kernels>;
  static auto* const made EBB_PT_GUARDED_BY(mutex) = new Made;  // lives as long as the process
  int major = 0;
  int minor = 0;
  C10_CUDA_CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device.index()));
  C10_CUDA_CHECK(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device.index()));
  if (major < kOldestMajor || definition(dtype) == nullptr) {
    return {};
  }
  const MutexLock lock(mutex);
  const auto found = made->find({major, minor, dtype});
  return found != made->end()
             ? found->second
             : made->emplace(std::tuple(major, minor, dtype), make_kernels(major, minor, dtype)).first->second;
}

bool is_aligned(const void* pointer) { return reinterpret_cast<std::uintptr_t>(pointer) % kVectorBytes == 0; }

}  // namespace

std::optional<at::Tensor> scale_rows(const at::Tensor& x, const at::Tensor& rstd, const at::Tensor& weight) {
  const std::int64_t rows = rstd.numel();
  const std::int64_t width = rows == 0 ? 0 : x.numel() / rows;
  const bool acc_is_right = rstd.scalar_type() == (x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat);
  const bool weight_is_right =
      !weight.defined() || (weight.numel() == width && weight.scalar_type() == x.scalar_type());
  if (rows == 0 || rows > std::numeric_limits<std::int32_t>::max() || width * rows != x.numel() || !acc_is_right ||
      !weight_is_right || width > std::numeric_limits<std::int32_t>::max()) {
    return std::nullopt;
  }
  const c10::cuda::CUDAGuard device(x.device());
  const Kernels kernels = kernels_for(x.device(), x.scalar_type());
  if (kernels.by_values == nullptr) {
    return std::nullopt;
  }
  const auto plain = [](const at::Tensor& tensor) { return tensor.resolve_neg().contiguous(); };
  const at::Tensor input = plain(x);
  const at::Tensor scale = plain(rstd);
  const at::Tensor columns = weight.defined() ? plain(weight) : weight;
  at::Tensor result = at::empty_like(input);
  const void* from = input.const_data_ptr();
  const void* by = scale.const_data_ptr();
  const void* times = columns.defined() ? columns.const_data_ptr() : nullptr;
  void* to = result.mutable_data_ptr();
  const bool whole_vectors =
      static_cast<std::size_t>(width) * input.element_size() % kVectorBytes == 0 && is_aligned(from) && is_aligned(to);
  auto columns_each = static_cast<std::uint32_t>(
      whole_vectors ? static_cast<std::size_t>(width) * input.element_size() / kVectorBytes : width);
  std::array<void*, 5> arguments{&from, &by, &times, &to, &columns_each};
  C10_CUDA_CHECK(cudaLaunchKernel(whole_vectors ? kernels.by_vectors : kernels.by_values,
                                  dim3(static_cast<std::uint32_t>(rows)), dim3(kThreads), arguments.data(), 0,
                                  c10::cuda::getCurrentCUDAStream(x.device().index()).stream()));
  return result;
}

}  // namespace ebb

# LibTorch for CUDA 13 and the CUDA runtime, from the wheels that a Python has installed: target ebb::torch. No CUDA
# toolkit is needed; LibTorch's own package asks for one. (third_party/torch.bzl is the same for Bazel.)
#
# Which Python: the variable LIBTORCH_PYTHON, else the environment's, else Python_EXECUTABLE, else python3.
#
# Sets EbbTorch_FOLDER (of the package torch), and target ebb::torch_python with what extension modules link, too.

if(NOT LIBTORCH_PYTHON)
  if(NOT "$ENV{LIBTORCH_PYTHON}" STREQUAL "")
    set(LIBTORCH_PYTHON "$ENV{LIBTORCH_PYTHON}")
  elseif(Python_EXECUTABLE)
    set(LIBTORCH_PYTHON "${Python_EXECUTABLE}")
  else()
    set(LIBTORCH_PYTHON python3)
  endif()
endif()
execute_process(
  COMMAND ${LIBTORCH_PYTHON} -c "import importlib.util as u; t = u.find_spec('torch')
print(t.submodule_search_locations[0] if t else '', end='')"
  OUTPUT_VARIABLE EbbTorch_FOLDER
  RESULT_VARIABLE EbbTorch_status
  ERROR_VARIABLE EbbTorch_error)

function(ebb_torch_missing message)
  set(EbbTorch_why "${message} (LIBTORCH_PYTHON names the Python whose torch is used: ${LIBTORCH_PYTHON})" PARENT_SCOPE)
endfunction()

unset(EbbTorch_why)
if(NOT EbbTorch_status STREQUAL 0)
  ebb_torch_missing("it could not be run: ${EbbTorch_status} ${EbbTorch_error}")
elseif(NOT EbbTorch_FOLDER)
  ebb_torch_missing("it has no torch: pip install torch==2.11.0 nvidia-cuda-crt==13.0.88 nvidia-cuda-cccl==13.0.85")
else()
  cmake_path(GET EbbTorch_FOLDER PARENT_PATH EbbTorch_wheels)
  set(EbbTorch_cuda ${EbbTorch_wheels}/nvidia/cu13)
  # A toolkit may have them, too.
  find_path(EbbTorch_CRT crt/host_config.h NO_CACHE HINTS ${EbbTorch_cuda}/include /usr/local/cuda/include)
  find_path(EbbTorch_CCCL nv/target NO_CACHE HINTS ${EbbTorch_cuda}/include /usr/local/cuda/include/cccl
                                          /usr/local/cuda/include)
  if(NOT EXISTS ${EbbTorch_FOLDER}/lib/libtorch_cuda.so)
    ebb_torch_missing("${EbbTorch_FOLDER}/lib has no libtorch_cuda.so: its torch was not built for CUDA")
  elseif(NOT EXISTS ${EbbTorch_cuda}/lib/libcudart.so.13)
    ebb_torch_missing("${EbbTorch_cuda}/lib has no libcudart.so.13: its torch was not built for CUDA 13")
  elseif(NOT EbbTorch_CRT)
    ebb_torch_missing("${EbbTorch_cuda}/include has no crt/host_config.h: install nvidia-cuda-crt, of the version of nvidia-cuda-runtime")
  elseif(NOT EbbTorch_CCCL)
    ebb_torch_missing("${EbbTorch_cuda}/include has no nv/target: install nvidia-cuda-cccl, of the version of nvidia-cuda-runtime")
  endif()
endif()

include(FindPackageHandleStandardArgs)
if(EbbTorch_why)
  set(EbbTorch_usable FALSE)
else()
  set(EbbTorch_usable TRUE)
endif()
find_package_handle_standard_args(
  EbbTorch REQUIRED_VARS EbbTorch_FOLDER EbbTorch_usable REASON_FAILURE_MESSAGE "${EbbTorch_why}")

if(EbbTorch_FOUND AND NOT TARGET ebb::torch)
  add_library(ebb::torch INTERFACE IMPORTED GLOBAL)
  set(EbbTorch_includes ${EbbTorch_FOLDER}/include ${EbbTorch_FOLDER}/include/torch/csrc/api/include
                        ${EbbTorch_cuda}/include ${EbbTorch_CRT} ${EbbTorch_CCCL})
  list(REMOVE_DUPLICATES EbbTorch_includes)
  target_include_directories(ebb::torch SYSTEM INTERFACE ${EbbTorch_includes})
  # LibTorch's headers then include the operators that they use, not all.
  target_compile_definitions(ebb::torch INTERFACE AT_PER_OPERATOR_HEADERS)
  # libstdc++ comes before LibTorch: libtorch_cpu exports old std::filesystem symbols that would stand in front of the
  # library's own, and with them std::filesystem::remove_all jumps to address 0. Options come before all libraries.
  target_link_options(ebb::torch INTERFACE "SHELL:-Wl,--push-state,--no-as-needed -lstdc++ -Wl,--pop-state")
  # libtorch_cuda registers itself when loaded; no symbol of it is named.
  set(EbbTorch_lib ${EbbTorch_FOLDER}/lib)
  target_link_libraries(
    ebb::torch
    INTERFACE -Wl,--push-state,--no-as-needed
              ${EbbTorch_lib}/libtorch.so
              ${EbbTorch_lib}/libtorch_cpu.so
              ${EbbTorch_lib}/libtorch_cuda.so
              ${EbbTorch_lib}/libc10.so
              ${EbbTorch_lib}/libc10_cuda.so
              -Wl,--pop-state
              ${EbbTorch_cuda}/lib/libcudart.so.13)
  # Libraries that LibTorch's need are found by their own RPATH when a program runs; the linker has to be told.
  target_link_options(ebb::torch INTERFACE -Wl,-rpath-link,${EbbTorch_lib} -Wl,-rpath-link,${EbbTorch_cuda}/lib)

  add_library(ebb::torch_python INTERFACE IMPORTED GLOBAL)
  target_link_libraries(ebb::torch_python INTERFACE ebb::torch ${EbbTorch_lib}/libtorch_python.so)
endif()

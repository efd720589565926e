# Tests and benchmarks without Bazel, for machines that lack it; GPU machines often do. Bazel's BUILD files are the ones
# that `./dev test` and CI use. Each program lies in the build folder where Bazel puts it below bazel-bin.
#
# EBB_BENCHES  bench/step, bench/model and bench/overhead, over the library as it is installed
# EBB_TESTS    test/streams_test, test/offload_test, test/random and test/process_probe. The library is then built for
#              tests (streams/base/wait_point.h) and is slower.

# ebb_objects(NAME FOLDERS...): the object files of these folders' sources, all but main.cc.
function(ebb_objects name)
  list(TRANSFORM ARGN APPEND "/*.cc" OUTPUT_VARIABLE globs)
  file(GLOB_RECURSE files CONFIGURE_DEPENDS RELATIVE ${CMAKE_CURRENT_SOURCE_DIR} ${globs})
  list(FILTER files EXCLUDE REGEX "main\\.cc$")
  add_library(${name} OBJECT ${files})
  ebb_compile(${name})
endfunction()

# As the library is compiled, with the headers that most programs include.
function(ebb_compile name)
  target_link_libraries(${name} PRIVATE ebb)
  target_compile_definitions(${name} PRIVATE FMT_HEADER_ONLY)
  target_include_directories(${name} BEFORE PRIVATE ${fmt_first})
  target_include_directories(${name} SYSTEM PRIVATE ${EBB_FMT_INCLUDE})
  target_precompile_headers(${name} PRIVATE <torch/torch.h>)
endfunction()

# ebb_program(PATH SOURCES... OBJECTS NAMES... LIBRARIES NAMES...): the program PATH below the build folder.
function(ebb_program path)
  cmake_parse_arguments(program "" "" "OBJECTS;LIBRARIES" ${ARGN})
  cmake_path(GET path PARENT_PATH folder)
  string(REPLACE "/" "_" name ${path})
  add_executable(${name} ${program_UNPARSED_ARGUMENTS})
  ebb_compile(${name})
  target_link_libraries(${name} PRIVATE ${program_OBJECTS} ${program_LIBRARIES})
  cmake_path(GET path FILENAME file)
  set_target_properties(${name} PROPERTIES OUTPUT_NAME ${file} RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/${folder})
endfunction()

ebb_objects(example_objects examples/common examples/llama)

if(EBB_BENCHES)
  find_library(EBB_BENCHMARK NAMES benchmark REQUIRED)
  ebb_objects(bench_objects bench/common bench/step)
  ebb_program(bench/step/step bench/step/main.cc OBJECTS bench_objects example_objects)
  file(GLOB model CONFIGURE_DEPENDS bench/model/*.cc)
  ebb_program(bench/model/model ${model} OBJECTS bench_objects example_objects)
  file(GLOB overhead CONFIGURE_DEPENDS bench/overhead/*.cc)
  ebb_program(bench/overhead/overhead ${overhead} OBJECTS bench_objects example_objects LIBRARIES ${EBB_BENCHMARK})
endif()

if(EBB_TESTS)
  target_compile_definitions(ebb PUBLIC EBB_TESTS)
  ebb_objects(test_objects test/checked test/simulated test/gpu test/random)
  target_sources(test_objects PRIVATE test/machine.cc)
  set(test_objects test_objects example_objects)
  file(GLOB_RECURSE streams_tests CONFIGURE_DEPENDS test/streams/*.cc)
  ebb_program(test/streams_test test/catch_main.cc ${streams_tests} OBJECTS ${test_objects})
  file(GLOB_RECURSE offload_tests CONFIGURE_DEPENDS test/offload/*.cc)
  # LibTorch's operators on vectors would print what Catch2 prints.
  set_target_properties(test_streams_test PROPERTIES DISABLE_PRECOMPILE_HEADERS ON)
  ebb_program(test/offload_test test/catch_main.cc ${offload_tests} OBJECTS ${test_objects})
  ebb_program(test/random test/random/main.cc OBJECTS ${test_objects})
  file(GLOB probes CONFIGURE_DEPENDS test/process/*.cc)
  ebb_program(test/process_probe ${probes} OBJECTS ${test_objects})
endif()

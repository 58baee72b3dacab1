# The CUDA backend: compiler settings, and what tessera_layer() adds for it. Included with TESSERA_CUDA alone.

find_program(CMAKE_CUDA_COMPILER nvcc HINTS ENV CUDA_HOME PATH_SUFFIXES bin PATHS /usr/local/cuda REQUIRED)
set(CMAKE_CUDA_ARCHITECTURES OFF)  # the flags below name the one target
set(CMAKE_CUDA_RUNTIME_LIBRARY Static)
# The language level is a flag, since CMake 3.25 does not know it for this compiler. -lineinfo costs nothing at run time,
# and every profile needs it.
set(CMAKE_CUDA_FLAGS "-std=c++20 -gencode=arch=compute_90a,code=sm_90a -lineinfo")
set(CMAKE_CUDA_FLAGS_RELEASE "-O3 -DNDEBUG")
set(CMAKE_CUDA_FLAGS_DEBUG "-O1 -g")
enable_language(CUDA)
set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION "")
set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION "")
find_package(CUDAToolkit REQUIRED)
if(TESSERA_CCACHE)
  set(CMAKE_CUDA_COMPILER_LAUNCHER ${TESSERA_CCACHE})
endif()

# For compute-sanitizer's racecheck; see ops/common/cuda/async_copy.cuh.
option(TESSERA_RACECHECK "every thread arrives at the barriers of the CUDA kernels" OFF)
if(TESSERA_RACECHECK)
  target_compile_definitions(tessera_settings INTERFACE TESSERA_RACECHECK)
else()
  set(spills "-Xptxas=--warn-on-spills,--warn-on-local-memory-usage")
endif()

# Host code inside .cu files: nvcc's own output passes neither -Wconversion nor -Wshadow. Spills and local memory are
# errors: a kernel that needs them says so by an option of its own.
target_compile_options(tessera_settings INTERFACE "$<$<COMPILE_LANGUAGE:CUDA>:SHELL:-Werror all-warnings\
 -Xcompiler=-Wall,-Wextra,-Wno-missing-field-initializers,-ffp-contract=off ${spills} --expt-relaxed-constexpr>")

# The programs that need a device. The CPU's tests are those of the other presets.
add_custom_target(cuda_tests)

# In a layer's directory: appends its CUDA sources to SOURCES and sets TESTS.
function(tessera_cuda_sources SOURCES TESTS)
  file(GLOB_RECURSE all CONFIGURE_DEPENDS *.cu *.cc)
  list(FILTER all INCLUDE REGEX "\\.cu$|/cuda/")
  set(tests ${all})
  list(FILTER all EXCLUDE REGEX "_(test|fuzz)\\.(cc|cu)$")
  list(FILTER tests INCLUDE REGEX "_test\\.(cc|cu)$")
  set(${SOURCES} ${${SOURCES}} ${all} PARENT_SCOPE)
  set(${TESTS} ${tests} PARENT_SCOPE)
endfunction()

# Links the runtime where the layer has CUDA sources, and cuBLASLt, which the dense operators use; makes cuda_NAME_test.
# That program needs a device, so ctest does not know it.
function(tessera_cuda_layer NAME SOURCES TESTS)
  if(SOURCES MATCHES "/cuda/|\\.cu(;|$)")
    target_link_libraries(tessera_${NAME} PUBLIC CUDA::cudart_static)
  endif()
  if(NAME STREQUAL ops)
    target_link_libraries(tessera_ops PUBLIC CUDA::cublasLt)
  endif()
  if(TESSERA_TESTS AND TESTS)
    add_executable(cuda_${NAME}_test ${TESTS})
    target_link_libraries(cuda_${NAME}_test PRIVATE tessera_settings tessera_${NAME} GTest::gmock_main GTest::gtest)
    target_compile_definitions(cuda_${NAME}_test PRIVATE TESSERA_SOURCE_DIR="${CMAKE_SOURCE_DIR}")
    add_dependencies(cuda_tests cuda_${NAME}_test)
  endif()
endfunction()

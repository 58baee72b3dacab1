# Compiler settings shared by every target, and the helpers that declare layers and tests.

if(NOT CMAKE_BUILD_TYPE)
  set(CMAKE_BUILD_TYPE Release)
endif()
set(CMAKE_CXX_FLAGS_RELEASE "-O2 -g1 -DNDEBUG")
set(CMAKE_CXX_FLAGS_DEBUG "-O1 -g")

find_program(TESSERA_CCACHE ccache)
if(TESSERA_CCACHE)
  set(CMAKE_CXX_COMPILER_LAUNCHER ${TESSERA_CCACHE})
endif()
find_program(TESSERA_MOLD mold)

add_library(tessera_settings INTERFACE)
target_include_directories(tessera_settings INTERFACE ${CMAKE_SOURCE_DIR}/src)
# Contraction off: the order and rounding of every float operation is what the source says, so that the
# reference, the AVX2 and the AVX-512 kernels can agree to the last bit.
set(TESSERA_CXX_OPTIONS
  -Wall -Wextra -Wshadow -Wno-missing-field-initializers -ffp-contract=off
  $<$<CXX_COMPILER_ID:GNU>:-Wconversion;-Wno-sign-conversion;-Werror>
  $<$<CONFIG:Debug>:-D_GLIBCXX_ASSERTIONS>)
target_compile_options(tessera_settings INTERFACE "$<$<COMPILE_LANGUAGE:CXX>:${TESSERA_CXX_OPTIONS}>")
target_compile_definitions(tessera_settings INTERFACE TESSERA_VERSION="${PROJECT_VERSION}")
if(TESSERA_MOLD AND CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  target_link_options(tessera_settings INTERFACE -fuse-ld=mold)
endif()
if(TESSERA_FUZZ)
  target_compile_options(tessera_settings INTERFACE -fsanitize=fuzzer-no-link)
endif()
if(TESSERA_CUDA)
  include(TesseraCuda)
endif()
if(TESSERA_SANITIZE)
  target_compile_options(tessera_settings INTERFACE -fsanitize=${TESSERA_SANITIZE} -fno-omit-frame-pointer)
  target_link_options(tessera_settings INTERFACE -fsanitize=${TESSERA_SANITIZE})
  # Thread sanitizer does not know fences; Asio's queues have locks beside them.
  if(TESSERA_SANITIZE MATCHES thread)
    target_compile_definitions(tessera_settings INTERFACE BOOST_ASIO_DISABLE_FENCED_BLOCK)
  endif()
endif()

# tessera_layer(NAME [DEPS layer-or-library...] [SUBDIRS dir...])
# One static library tessera_NAME from the layer's *.cc (tests and benches left out), and one test program
# NAME_test from its *_test.cc. SUBDIRS adds the sources of directories below the layer's own. The CUDA backend, *.cu and
# everything in directories named cuda/, is part of it with TESSERA_CUDA alone; its tests make cuda_NAME_test.
function(tessera_layer NAME)
  cmake_parse_arguments(ARG "" "" "DEPS" ${ARGN})
  file(GLOB_RECURSE sources CONFIGURE_DEPENDS *.cc)
  list(FILTER sources EXCLUDE REGEX "/cuda/")
  set(tests ${sources})
  list(FILTER sources EXCLUDE REGEX "_(test|fuzz)\\.cc$")
  list(FILTER tests INCLUDE REGEX "_test\\.cc$")
  if(TESSERA_CUDA)
    tessera_cuda_sources(sources cuda_tests)
  endif()
  if(sources)
    add_library(tessera_${NAME} STATIC ${sources})
    set(scope PUBLIC)
  else()
    add_library(tessera_${NAME} INTERFACE)
    set(scope INTERFACE)
  endif()
  target_link_libraries(tessera_${NAME} ${scope} tessera_settings ${ARG_DEPS})
  if(TESSERA_TESTS AND tests)
    tessera_test(${NAME}_test SOURCES ${tests} DEPS tessera_${NAME})
  endif()
  if(TESSERA_CUDA)
    tessera_cuda_layer(${NAME} "${sources}" "${cuda_tests}")
  endif()
endfunction()

# tessera_test(NAME SOURCES file... [DEPS library...]): a GoogleTest program, each of its tests known to ctest.
function(tessera_test NAME)
  cmake_parse_arguments(ARG "" "" "SOURCES;DEPS" ${ARGN})
  add_executable(${NAME} ${ARG_SOURCES})
  target_link_libraries(${NAME} PRIVATE tessera_settings ${ARG_DEPS} GTest::gmock_main GTest::gtest)
  target_compile_definitions(${NAME} PRIVATE TESSERA_SOURCE_DIR="${CMAKE_SOURCE_DIR}")
  gtest_discover_tests(${NAME} DISCOVERY_MODE PRE_TEST TEST_PREFIX "${NAME}." PROPERTIES TIMEOUT 600)
endfunction()

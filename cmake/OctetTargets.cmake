# The flags every target shares, and one helper for each kind of target.

find_package(Threads REQUIRED)
find_package(nlohmann_json REQUIRED)
# Only the static archives: the program is one file that needs no such library installed.
find_library(PCRE2_ARCHIVE libpcre2-8.a REQUIRED)
find_library(UTF8PROC_ARCHIVE libutf8proc.a REQUIRED)
find_library(ZLIB_ARCHIVE libz.a REQUIRED)

add_library(octet_flags INTERFACE)
target_include_directories(octet_flags INTERFACE ${PROJECT_SOURCE_DIR}/src)
target_compile_definitions(octet_flags INTERFACE OCTET_VERSION="${PROJECT_VERSION}")
# Contraction is decided in the source (an explicit fused multiply-add), never by the compiler: the
# bytes of a run must not depend on the optimiser.
target_compile_options(octet_flags INTERFACE
  $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra -Werror -ffp-contract=off>)
target_link_options(octet_flags INTERFACE -static-libgcc -static-libstdc++)
target_link_libraries(octet_flags INTERFACE Threads::Threads)
if(OCTET_SANITIZE)
  target_compile_options(octet_flags INTERFACE -fsanitize=address,undefined
    -fno-sanitize-recover=all -fno-omit-frame-pointer -g1 -O1)
  target_link_options(octet_flags INTERFACE -fsanitize=address,undefined)
endif()

# octet_library(NAME SOURCES a.cpp … DEPENDS octet_base …)
function(octet_library name)
  cmake_parse_arguments(ARG "" "" "SOURCES;DEPENDS;PRIVATE" ${ARGN})
  add_library(${name} STATIC ${ARG_SOURCES})
  target_link_libraries(${name} PUBLIC octet_flags ${ARG_DEPENDS} PRIVATE ${ARG_PRIVATE})
endfunction()

# octet_test(NAME SOURCES a_test.cpp … DEPENDS octet_base …): one program, one CTest entry per case.
function(octet_test name)
  cmake_parse_arguments(ARG "" "" "SOURCES;DEPENDS" ${ARGN})
  add_executable(${name} ${ARG_SOURCES})
  target_link_libraries(${name} PRIVATE octet_flags ${ARG_DEPENDS} GTest::gtest GTest::gtest_main)
  target_include_directories(${name} PRIVATE ${PROJECT_SOURCE_DIR}/tests)
  target_compile_definitions(${name} PRIVATE OCTET_SOURCE_DIR="${PROJECT_SOURCE_DIR}"
    OCTET_BINARY_DIR="${PROJECT_BINARY_DIR}")
  gtest_discover_tests(${name} DISCOVERY_MODE PRE_TEST PROPERTIES TIMEOUT 300)
endfunction()

# CUDA as CMake 3.25 can have it: it knows neither C++20 for this nvcc nor new architectures by name,
# so both are given as flags.
if(OCTET_SANITIZE)
  message(FATAL_ERROR "OCTET_CUDA and OCTET_SANITIZE exclude each other: use compute-sanitizer")
endif()
set(CMAKE_CUDA_ARCHITECTURES OFF)
if(NOT CMAKE_CUDA_COMPILER AND NOT DEFINED ENV{CUDACXX})
  find_program(OCTET_NVCC nvcc PATHS /usr/local/cuda/bin)
  if(NOT OCTET_NVCC)
    message(FATAL_ERROR "OCTET_CUDA needs nvcc, which is neither on the PATH nor in /usr/local/cuda/bin; \
./run build --cuda fetches it")
  endif()
  set(CMAKE_CUDA_COMPILER ${OCTET_NVCC})
endif()
# No fused multiply-add but where the source says so. fmt switches its constexpr functions off under
# nvcc, and its checked strings need them.
set(CMAKE_CUDA_FLAGS "-fmad=false \
-diag-suppress 2908 --expt-relaxed-constexpr -DFMT_USE_CONSTEXPR=1 -DFMT_CONSTEVAL= \
-Xcompiler=-Wall,-Wextra,-Werror")
set(CMAKE_CUDA_FLAGS_RELEASE "-O3 -DNDEBUG")
enable_language(CUDA)
set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION "-std=c++20")
set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION "-std=c++20")
if(CCACHE AND NOT CMAKE_CUDA_COMPILER_LAUNCHER)
  set(CMAKE_CUDA_COMPILER_LAUNCHER ${CCACHE})
endif()

// Turning CUDA's status codes into Errors. Host code only.
#pragma once

#include <cuda_runtime_api.h>
#include <string_view>

namespace octet::cuda {

// Throws Error naming `what`, the status and what it means.
[[noreturn]] void fail_status(std::string_view what, cudaError_t status);

inline void check(cudaError_t status, std::string_view what) {
  if (status != cudaSuccess) [[unlikely]]
    fail_status(what, status);
}

// Whether the kernel that was just launched could be.
inline void check_launch(std::string_view op) { check(cudaGetLastError(), op); }

}  // namespace octet::cuda

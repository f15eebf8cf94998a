// Launching with attributes that the <<<>>> syntax does not have; Hopper's, so not where the
// portable kernels serve.
#pragma once

#include <cuda_runtime.h>

#include "backend/cuda/context.h"
#include "backend/cuda/status.h"

namespace octet::cuda {

// A kernel started by `launch` may be resident before the one queued ahead of it is done: it waits
// for that one's results, and reads before only what is older. It lets its own successor come
// likewise.
__device__ inline void await_predecessor() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// Before await_predecessor, in a short kernel: a product behind it may read its weights
// (ops::LinearArgs::settled) while what stands before this kernel still runs. Not in a kernel whose
// successor reads anything else early, nor in several in a row.
__device__ inline void invite_successor() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

struct LaunchShape {
  dim3 grid;
  unsigned num_threads;
  bool clustered = false;  // the blocks of one x run together
  unsigned shared_bytes = 0;
};

template <class... Parameters>
void launch(std::string_view op, Context& context, const LaunchShape& shape,
            void (*kernel)(Parameters...), const Parameters&... parameters) {
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim = {.x = 1, .y = shape.grid.y, .z = 1};
  cudaLaunchConfig_t config{};
  config.gridDim = shape.grid;
  config.blockDim = dim3(shape.num_threads);
  config.dynamicSmemBytes = shape.shared_bytes;
  config.stream = context.stream();
  config.attrs = attributes;
  config.numAttrs = context.portable() ? 0 : shape.clustered ? 2 : 1;
  check(cudaLaunchKernelEx(&config, kernel, parameters...), op);
}

}  // namespace octet::cuda

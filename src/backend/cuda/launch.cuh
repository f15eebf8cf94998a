// Launching with attributes that the <<<>>> syntax does not have.
#pragma once

#include <cuda_runtime.h>

#include "backend/cuda/status.h"

namespace octet::cuda {

struct LaunchShape {
  unsigned num_blocks;
  dim3 block;
  unsigned cluster = 1;  // neighbouring blocks that run together
};

template <class... Parameters>
void launch(std::string_view op, cudaStream_t stream, const LaunchShape& shape,
            void (*kernel)(Parameters...), const Parameters&... parameters) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {.x = shape.cluster, .y = 1, .z = 1};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(shape.num_blocks);
  config.blockDim = shape.block;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = shape.cluster > 1 ? 1 : 0;
  check(cudaLaunchKernelEx(&config, kernel, parameters...), op);
}

}  // namespace octet::cuda

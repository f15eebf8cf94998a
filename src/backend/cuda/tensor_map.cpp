#include "backend/cuda/tensor_map.h"

#include <algorithm>
#include <cuda_runtime.h>

#include "base/error.h"

namespace octet::cuda {

bool make_tensor_map(CUtensorMap& map, const void* data, int64_t row_bytes, int64_t rows) {
  using Encode = decltype(&cuTensorMapEncodeTiled);
  static const Encode encode = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult result{};
    const cudaError_t status = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function,
                                                                12000, cudaEnableDefault, &result);
    if (status != cudaSuccess || result != cudaDriverEntryPointSuccess) function = nullptr;
    return reinterpret_cast<Encode>(function);
  }();
  if (encode == nullptr) return false;
  const bool wide = row_bytes >= 128;
  const cuuint64_t sizes[2] = {static_cast<cuuint64_t>(row_bytes), static_cast<cuuint64_t>(rows)};
  const cuuint64_t strides[1] = {static_cast<cuuint64_t>(row_bytes)};
  const cuuint32_t box[2] = {wide ? 128u : 64u, 16}, steps[2] = {1, 1};
  return encode(&map, CU_TENSOR_MAP_DATA_TYPE_UINT8, 2, const_cast<void*>(data), sizes, strides,
                box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                wide ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B,
                CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

CUtensorMap key_map_of(const ops::KvCacheView& cache) {
  CUtensorMap map;
  const int64_t rows = cache.k.shape[0] * cache.num_heads() * cache.page_size();
  if (!make_tensor_map(map, cache.k.data, cache.k.shape[3], rows)) {
    fail("attention",
         "the driver makes no tensor map of {} keys of {} bytes; update it, or use --device cpu",
         rows, cache.k.shape[3]);
  }
  return map;
}

}  // namespace octet::cuda

#include "backend/cuda/tensor_map.h"

#include <algorithm>
#include <cuda_runtime.h>

#include "base/error.h"

namespace octet::cuda {
namespace {

bool encode_bytes(CUtensorMap& map, const void* data, int64_t row_bytes, int64_t rows,
                  int64_t stride_bytes, int box_bytes, int box_rows, CUtensorMapSwizzle swizzle) {
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
  const cuuint64_t sizes[2] = {static_cast<cuuint64_t>(row_bytes), static_cast<cuuint64_t>(rows)};
  const cuuint64_t strides[1] = {static_cast<cuuint64_t>(stride_bytes)};
  const cuuint32_t box[2] = {static_cast<cuuint32_t>(box_bytes), static_cast<cuuint32_t>(box_rows)};
  const cuuint32_t steps[2] = {1, 1};
  return encode(&map, CU_TENSOR_MAP_DATA_TYPE_UINT8, 2, const_cast<void*>(data), sizes, strides,
                box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle,
                CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

}  // namespace

bool make_tensor_map(CUtensorMap& map, const void* data, int64_t row_bytes, int64_t rows,
                     int64_t stride_bytes, int box_rows) {
  const bool wide = row_bytes >= 128;
  return encode_bytes(map, data, row_bytes, rows, stride_bytes == 0 ? row_bytes : stride_bytes,
                      wide ? 128 : 64, box_rows,
                      wide ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B);
}

bool make_scale_map(CUtensorMap& map, const float* scales, int64_t chunks, int64_t rows,
                    int64_t stride, int box_rows) {
  return encode_bytes(map, scales, 4 * chunks, rows, 4 * stride, 16, box_rows,
                      CU_TENSOR_MAP_SWIZZLE_NONE);
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

#include <cstring>

#include "backend/cpu/ops.h"
#include "base/error.h"

namespace octet::cpu {

void scatter_rows(Context&, const ops::ScatterRowsArgs& args) {
  const auto& [rows, ids, out] = args;
  if (rows.dtype != out.dtype || ids.dtype != tensor::DType::kI32 || ids.rows() != rows.rows() ||
      rows.row_elements() != out.row_elements()) {
    fail("scatter_rows", "rows {} and out {} must agree in dtype and width, ids {} in length",
         rows.shape.to_string(), out.shape.to_string(), ids.shape.to_string());
  }
  const int64_t element_bytes = tensor::dtype_bytes(out.dtype);
  const int64_t row_bytes = out.row_elements() * element_bytes;
  for (int64_t r = 0; r < rows.rows(); ++r) {
    if (ids.as<int32_t>()[r] < 0) continue;
    std::memcpy(out.as<char>() + ids.as<int32_t>()[r] * out.row_stride * element_bytes,
                rows.as<char>() + r * rows.row_stride * element_bytes,
                static_cast<size_t>(row_bytes));
  }
}

}  // namespace octet::cpu

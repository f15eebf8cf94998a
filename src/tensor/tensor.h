// Shapes, element types and borrowed views. A view owns nothing; it stays valid as long as the
// Buffer it looks into.
#pragma once

#include <array>
#include <cstdint>
#include <initializer_list>
#include <span>
#include <string>
#include <string_view>

#include "base/error.h"

namespace octet::tensor {

enum class DType : uint8_t {
  kF32,
  kBF16,
  kF16,
  kE4M3,
  kE5M2,
  kI64,
  kI32,
  kU32,
  kI16,
  kU16,
  kI8,
  kU8,
  kBool,
  kF64,
  kE8M0,
};

int64_t dtype_bytes(DType dtype);
std::string_view dtype_name(DType dtype);  // as safetensors spells it: "F32", "BF16", "F8_E4M3" …

// Up to four extents, outermost first.
class Shape {
 public:
  static constexpr int kMaxRank = 4;
  Shape() = default;
  Shape(std::initializer_list<int64_t> extents);
  explicit Shape(std::span<const int64_t> extents);

  int rank() const { return rank_; }
  int64_t operator[](int axis) const { return extents_[axis]; }
  int64_t num_elements() const;  // 1 for rank 0
  bool operator==(const Shape& other) const;
  std::string to_string() const;  // "[2, 3]"

 private:
  std::array<int64_t, kMaxRank> extents_{};
  int rank_ = 0;
};

// A borrowed array in the memory of a backend. Row-major; all axes but the first are contiguous,
// and `row_stride` elements lie between neighbours along the first (so a slice of columns is a
// view).
struct TensorView {
  void* data = nullptr;
  DType dtype = DType::kF32;
  Shape shape;
  int64_t row_stride = 0;

  TensorView() = default;
  TensorView(void* data, DType dtype, Shape shape);  // contiguous
  TensorView(void* data, DType dtype, Shape shape, int64_t row_stride);

  bool empty() const { return data == nullptr; }
  int64_t rows() const { return shape.rank() == 0 ? 1 : shape[0]; }
  int64_t row_elements() const;  // elements of one index of the first axis
  int64_t num_elements() const { return shape.num_elements(); }
  int64_t num_bytes() const { return num_elements() * dtype_bytes(dtype); }
  bool contiguous() const { return row_stride == row_elements() || rows() <= 1; }

  template <class T>
  T* row(int64_t index) const {
    return static_cast<T*>(data) + index * row_stride;
  }
  template <class T>
  T* as() const {
    return static_cast<T*>(data);
  }

  TensorView slice_rows(int64_t begin, int64_t count) const;
  TensorView slice_columns(int64_t begin, int64_t count) const;  // rank 2
  TensorView reshaped(Shape new_shape) const;  // contiguous, or [R, a·b] <-> [R, a, b]
};

enum class Granularity : uint8_t {
  kTensor,    // scales [1]
  kRow,       // scales [R]: weights per output channel, activations per token
  kBlock,     // scales [⌈R/128⌉, ⌈C/128⌉]: weights
  kRowBlock,  // scales [R, ⌈C/128⌉]: activations per token and 128 columns
};
enum class ScaleFormat : uint8_t { kF32, kPow2 };

inline constexpr int64_t kScaleBlock = 128;

std::string_view granularity_name(Granularity granularity);
Shape scale_shape(Granularity granularity, int64_t rows, int64_t columns);

// Borrowed codes [R, C] (E4M3 or E5M2) with their F32 scales; value = code × scale.
struct QuantizedView {
  TensorView codes;
  TensorView scales;
  Granularity granularity = Granularity::kTensor;

  bool empty() const { return codes.empty(); }
  int64_t rows() const { return codes.shape[0]; }
  int64_t columns() const { return codes.shape[1]; }
};

}  // namespace octet::tensor

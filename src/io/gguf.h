// The GGUF format, version 2 and 3: a strict reader over a memory map.
// (https://github.com/ggml-org/ggml, docs/gguf.md).
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tensor/tensor.h"

namespace octet::io {

struct GgufTensor {
  std::string name;
  uint32_t type = 0;    // ggml type code
  tensor::Shape shape;  // outermost first, so [out, in] for a linear layer
  const uint8_t* data = nullptr;
  int64_t num_bytes = 0;  // 0 where the type is not one that is read
};

std::string gguf_type_name(uint32_t type);  // "Q4_1"; "type 99" where unknown

// The bytes of a tensor by its type and shape, 0 for a type that is not read. Error where its rows
// are no whole blocks.
int64_t gguf_tensor_bytes(const std::string& path, const GgufTensor& tensor);

// One file, mapped read-only. Sizes, counts and offsets are checked against the file before use.
class GgufFile {
 public:
  explicit GgufFile(const std::string& path);
  ~GgufFile();
  GgufFile(GgufFile&&) noexcept;
  GgufFile& operator=(GgufFile&&) noexcept;

  const std::string& path() const;
  const std::vector<GgufTensor>& tensors() const;  // in file order
  const GgufTensor* find(std::string_view name) const;

  // Metadata. `get_*` is an Error naming the key where it is missing or of another kind; the
  // variants with a fallback are so only for another kind.
  bool has_key(std::string_view key) const;
  int64_t get_int(std::string_view key) const;
  int64_t get_int(std::string_view key, int64_t fallback) const;
  double get_float(std::string_view key) const;
  double get_float(std::string_view key, double fallback) const;
  bool get_bool(std::string_view key, bool fallback) const;
  std::string get_string(std::string_view key) const;
  std::string get_string(std::string_view key, std::string_view fallback) const;
  std::vector<std::string> get_strings(std::string_view key) const;
  std::vector<int64_t> get_ints(std::string_view key) const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

// The element type a tensor keeps without loss: F32, F16 and BF16 as they are, quantised ones F32.
// Error naming the tensor and its type where it is not one of F32, F16, BF16, Q4_0, Q4_1, Q5_0,
// Q5_1, Q8_0.
tensor::DType gguf_lossless_dtype(const GgufTensor& tensor);

bool gguf_is_quantized(const GgufTensor& tensor);  // in blocks of several elements

// Float32 values of the whole tensor; `values` has as many elements.
void gguf_dequantize(const GgufTensor& tensor, std::span<float> values);

}  // namespace octet::io

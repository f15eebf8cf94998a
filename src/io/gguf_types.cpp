// The element types of GGUF: block sizes and dequantisation. Formulas: ggml-quants.c of ggml,
// dequantize_row_*; arithmetic in float32, product and sum rounded one after the other.
#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include <fmt/format.h>

#include "base/error.h"
#include "io/gguf.h"
#include "tensor/codec.h"

namespace octet::io {
namespace {

using tensor::DType;

constexpr int64_t kBlockElements = 32;

float load_f16(const uint8_t* data) {
  uint16_t code;
  std::memcpy(&code, data, sizeof(code));
  return tensor::decode_f16(code);
}

float load_bf16(const uint8_t* data) {
  uint16_t code;
  std::memcpy(&code, data, sizeof(code));
  return tensor::decode_bf16(code);
}

void dequantize_f32(const uint8_t* data, float* values) { std::memcpy(values, data, 4); }
void dequantize_f16(const uint8_t* data, float* values) { *values = load_f16(data); }
void dequantize_bf16(const uint8_t* data, float* values) { *values = load_bf16(data); }

// Nibble j of a block of 32: the low halves hold elements 0 … 15, the high ones 16 … 31.
int nibble(const uint8_t* packed, int j) { return j < 16 ? packed[j] & 15 : packed[j - 16] >> 4; }

// f16 scale, 16 bytes.
void dequantize_q4_0(const uint8_t* data, float* values) {
  const float scale = load_f16(data);
  for (int j = 0; j < kBlockElements; ++j) {
    values[j] = static_cast<float>(nibble(data + 2, j) - 8) * scale;
  }
}

// f16 scale, f16 minimum, 16 bytes.
void dequantize_q4_1(const uint8_t* data, float* values) {
  const float scale = load_f16(data);
  const float minimum = load_f16(data + 2);
  for (int j = 0; j < kBlockElements; ++j) {
    values[j] = static_cast<float>(nibble(data + 4, j)) * scale + minimum;
  }
}

// `bits` holds the fifth bit of each element.
int five_bits(const uint8_t* bits, const uint8_t* packed, int j) {
  uint32_t high;
  std::memcpy(&high, bits, sizeof(high));
  return nibble(packed, j) | static_cast<int>(high >> j & 1u) << 4;
}

// f16 scale, u32 fifth bits, 16 bytes.
void dequantize_q5_0(const uint8_t* data, float* values) {
  const float scale = load_f16(data);
  for (int j = 0; j < kBlockElements; ++j) {
    values[j] = static_cast<float>(five_bits(data + 2, data + 6, j) - 16) * scale;
  }
}

// f16 scale, f16 minimum, u32 fifth bits, 16 bytes.
void dequantize_q5_1(const uint8_t* data, float* values) {
  const float scale = load_f16(data);
  const float minimum = load_f16(data + 2);
  for (int j = 0; j < kBlockElements; ++j) {
    values[j] = static_cast<float>(five_bits(data + 4, data + 8, j)) * scale + minimum;
  }
}

// f16 scale, 32 signed bytes.
void dequantize_q8_0(const uint8_t* data, float* values) {
  const float scale = load_f16(data);
  for (int j = 0; j < kBlockElements; ++j) {
    values[j] = static_cast<float>(static_cast<int8_t>(data[2 + j])) * scale;
  }
}

struct BlockType {
  uint32_t type;
  int64_t elements;  // per block
  int64_t bytes;
  DType lossless;
  void (*dequantize)(const uint8_t* block, float* values);
};

constexpr BlockType kBlockTypes[] = {
    {0, 1, 4, DType::kF32, dequantize_f32},
    {1, 1, 2, DType::kF16, dequantize_f16},
    {2, kBlockElements, 18, DType::kF32, dequantize_q4_0},
    {3, kBlockElements, 20, DType::kF32, dequantize_q4_1},
    {6, kBlockElements, 22, DType::kF32, dequantize_q5_0},
    {7, kBlockElements, 24, DType::kF32, dequantize_q5_1},
    {8, kBlockElements, 34, DType::kF32, dequantize_q8_0},
    {30, 1, 2, DType::kBF16, dequantize_bf16},
};

constexpr std::pair<uint32_t, const char*> kTypeNames[] = {
    {0, "F32"},     {1, "F16"},    {2, "Q4_0"},     {3, "Q4_1"},    {6, "Q5_0"},     {7, "Q5_1"},
    {8, "Q8_0"},    {9, "Q8_1"},   {10, "Q2_K"},    {11, "Q3_K"},   {12, "Q4_K"},    {13, "Q5_K"},
    {14, "Q6_K"},   {15, "Q8_K"},  {16, "IQ2_XXS"}, {17, "IQ2_XS"}, {18, "IQ3_XXS"}, {19, "IQ1_S"},
    {20, "IQ4_NL"}, {21, "IQ3_S"}, {22, "IQ2_S"},   {23, "IQ4_XS"}, {24, "I8"},      {25, "I16"},
    {26, "I32"},    {27, "I64"},   {28, "F64"},     {29, "IQ1_M"},  {30, "BF16"},    {34, "TQ1_0"},
    {35, "TQ2_0"},  {39, "MXFP4"},
};

const BlockType* find_block_type(uint32_t type) {
  const auto* found = std::ranges::find(kBlockTypes, type, &BlockType::type);
  return found == std::end(kBlockTypes) ? nullptr : found;
}

const BlockType& require_block_type(const GgufTensor& tensor) {
  const BlockType* found = find_block_type(tensor.type);
  if (found == nullptr) {
    fail("gguf",
         "tensor \"{}\" has the type {}, but only F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1 and Q8_0 "
         "are read; take a file of one of these",
         tensor.name, gguf_type_name(tensor.type));
  }
  return *found;
}

}  // namespace

std::string gguf_type_name(uint32_t type) {
  for (const auto& [code, name] : kTypeNames) {
    if (code == type) return name;
  }
  return fmt::format("type {}", type);
}

int64_t gguf_tensor_bytes(const std::string& path, const GgufTensor& tensor) {
  const BlockType* type = find_block_type(tensor.type);
  if (type == nullptr) return 0;
  const int64_t columns = tensor.shape.rank() == 0 ? 1 : tensor.shape[tensor.shape.rank() - 1];
  if (columns % type->elements != 0) {
    fail(path, "tensor \"{}\" of type {} must have rows of a multiple of {} elements, but has {}",
         tensor.name, gguf_type_name(tensor.type), type->elements, tensor.shape.to_string());
  }
  return tensor.shape.num_elements() / type->elements * type->bytes;
}

tensor::DType gguf_lossless_dtype(const GgufTensor& tensor) {
  return require_block_type(tensor).lossless;
}

bool gguf_is_quantized(const GgufTensor& tensor) { return require_block_type(tensor).elements > 1; }

void gguf_dequantize(const GgufTensor& tensor, std::span<float> values) {
  const BlockType& type = require_block_type(tensor);
  OCTET_ASSERT(std::ssize(values) == tensor.shape.num_elements());
  const int64_t num_blocks = std::ssize(values) / type.elements;
  for (int64_t i = 0; i < num_blocks; ++i) {
    type.dequantize(tensor.data + i * type.bytes, values.data() + i * type.elements);
  }
}

}  // namespace octet::io

// Rows of numbers: conversion, quantisation, decoding. The bytes are the same on every Isa.
#pragma once

#include <cstdint>

#include "backend/cpu/isa.h"
#include "ops/quantize.h"

namespace octet::cpu {

struct CodecKernels {
  void (*bf16_to_f32)(const uint16_t* x, int64_t count, float* out);
  void (*f32_to_bf16)(const float* x, int64_t count, uint16_t* out);
  void (*round_to_bf16)(const float* x, int64_t count, float* out);

  void (*multiply)(const float* x, const float* y, int64_t count, float* out);
  void (*multiply_by)(const float* x, float factor, int64_t count, float* out);

  // Largest magnitude of the finite values; 0 where there is none.
  float (*largest)(const float* x, int64_t count);
  // running[i] = max(running[i], |x[i]|) where x[i] is finite.
  void (*largest_by_column)(const float* x, int64_t count, float* running);

  // codes[i] = encode(x[i] / scale), and what became of the values is added to the counters.
  void (*encode)(const float* x, int64_t count, float scale, tensor::DType format, uint8_t* codes,
                 ops::QuantizeCounters& counters);
  // codes[i] = encode(x[i] / scales[i]).
  void (*encode_by_column)(const float* x, int64_t count, const float* scales, tensor::DType format,
                           uint8_t* codes, ops::QuantizeCounters& counters);
  // The values of codes, without a scale.
  void (*decode)(const uint8_t* codes, int64_t count, tensor::DType format, float* out);
};

const CodecKernels& codec_kernels(Isa isa);

}  // namespace octet::cpu

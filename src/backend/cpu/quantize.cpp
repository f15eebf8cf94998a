#include <algorithm>

#include "backend/cpu/codec_kernels.h"
#include "backend/cpu/matrix_checks.h"
#include "backend/cpu/ops.h"
#include "backend/cpu/quantize_rows.h"

namespace octet::cpu {
namespace {

using tensor::DType;
using tensor::Granularity;
using tensor::kScaleBlock;

// One call: reads rows as the quantiser sees them and works on groups of them.
class Quantizer {
 public:
  Quantizer(Context& context, const ops::QuantizeArgs& args)
      : context_(context), codec_(codec_kernels(context.isa)), args_(args) {}

  void by_tensor() {
    float* row_largest = context_.shared_scratch[0].take<float>(rows());
    for_rows(rows(), columns(), [&](int64_t row, float* values, auto&) {
      load(row, values);
      row_largest[row] = codec_.largest(values, columns());
    });
    float amax = 0;
    for (int64_t row = 0; row < rows(); ++row) amax = std::max(amax, row_largest[row]);
    const float scale = scale_for(amax);
    *args_.out.scales.as<float>() = scale;
    for_rows(rows(), columns(), [&](int64_t row, float* values, auto& counters) {
      load(row, values);
      encode(row, 0, columns(), values, scale, counters);
    });
  }

  // Groups of `width` columns in each row.
  void by_row(int64_t width) {
    const int64_t groups = divide_up(columns(), width);
    for_rows(rows(), columns(), [&](int64_t row, float* values, auto& counters) {
      load(row, values);
      for (int64_t group = 0; group < groups; ++group) {
        const int64_t begin = group * width;
        const int64_t count = std::min(width, columns() - begin);
        const float scale = scale_for(codec_.largest(values + begin, count));
        args_.out.scales.as<float>()[row * groups + group] = scale;
        encode(row, begin, count, values + begin, scale, counters);
      }
    });
  }

  void by_block() {
    const int64_t groups = divide_up(columns(), kScaleBlock);
    for_rows(divide_up(rows(), kScaleBlock), columns() * kScaleBlock,
             [&](int64_t block, float* values, auto& counters) {
               const int64_t first = block * kScaleBlock;
               const int64_t last = std::min(first + kScaleBlock, rows());
               float* scales = args_.out.scales.as<float>() + block * groups;
               std::fill_n(scales, groups, 0.0f);
               for (int64_t row = first; row < last; ++row) {
                 load(row, values);
                 for (int64_t group = 0; group < groups; ++group) {
                   const int64_t begin = group * kScaleBlock;
                   const int64_t count = std::min(kScaleBlock, columns() - begin);
                   scales[group] = std::max(scales[group], codec_.largest(values + begin, count));
                 }
               }
               for (int64_t group = 0; group < groups; ++group) {
                 scales[group] = scale_for(scales[group]);
               }
               for (int64_t row = first; row < last; ++row) {
                 load(row, values);
                 for (int64_t group = 0; group < groups; ++group) {
                   const int64_t begin = group * kScaleBlock;
                   const int64_t count = std::min(kScaleBlock, columns() - begin);
                   encode(row, begin, count, values + begin, scales[group], counters);
                 }
               }
             });
  }

 private:
  int64_t rows() const { return args_.x.shape[0]; }
  int64_t columns() const { return args_.x.shape[1]; }

  void load(int64_t row, float* values) const {
    load_row_as_bf16(codec_, args_.x, row, 0, columns(), values);
    if (!args_.column_scale.empty()) {
      codec_.multiply(values, args_.column_scale.as<const float>(), columns(), values);
    }
  }
  float scale_for(float amax) const {
    return scale_of(amax, args_.out.codes.dtype, args_.scale_format);
  }
  void encode(int64_t row, int64_t begin, int64_t count, const float* values, float scale,
              ops::QuantizeCounters& counters) const {
    codec_.encode(values, count, scale, args_.out.codes.dtype,
                  args_.out.codes.row<uint8_t>(row) + begin, counters);
  }

  // body(index, room for one row, counters) for each index, on all threads.
  template <class Body>
  void for_rows(int64_t count, int64_t cost, const Body& body) {
    const auto range = [&](int64_t begin, int64_t end, int thread) {
      float* values = context_.thread_scratch[thread].take<float>(columns());
      ops::QuantizeCounters counters;
      for (int64_t index = begin; index < end; ++index) body(index, values, counters);
      add_counters(context_.counters, counters);
    };
    context_.pool.parallel_for(
        count, grain_for(cost),
        [&range](int64_t begin, int64_t end, int thread) { range(begin, end, thread); });
  }

  Context& context_;
  const CodecKernels& codec_;
  const ops::QuantizeArgs& args_;
};

}  // namespace

void quantize(Context& context, const ops::QuantizeArgs& args) {
  check_codes("quantize", "out", args.out);
  const int64_t columns = args.out.columns();
  check_matrix("quantize", "x", args.x, args.out.rows(), columns);
  if (!args.column_scale.empty()) {
    check_vector("quantize", "column_scale", args.column_scale, columns);
  }
  Quantizer quantizer(context, args);
  switch (args.out.granularity) {
    case Granularity::kTensor:
      return quantizer.by_tensor();
    case Granularity::kRow:
      return quantizer.by_row(std::max<int64_t>(1, columns));
    case Granularity::kRowBlock:
      return quantizer.by_row(kScaleBlock);
    case Granularity::kBlock:
      return quantizer.by_block();
  }
}

void dequantize(Context& context, const ops::DequantizeArgs& args) {
  check_codes("dequantize", "x", args.x);
  check_matrix("dequantize", "out", args.out, args.x.rows(), args.x.columns());
  const CodecKernels& codec = codec_kernels(context.isa);
  const int64_t columns = args.x.columns();
  const auto range = [&](int64_t first, int64_t last, int thread) {
    float* values = context.thread_scratch[thread].take<float>(columns);
    for (int64_t row = first; row < last; ++row) {
      float* out = args.out.dtype == DType::kF32 ? args.out.row<float>(row) : values;
      dequantize_row(codec, args.x, row, 0, columns, out);
      if (out == values) codec.f32_to_bf16(values, columns, args.out.row<uint16_t>(row));
    }
  };
  context.pool.parallel_for(
      args.x.rows(), grain_for(columns),
      [&range](int64_t first, int64_t last, int thread) { range(first, last, thread); });
}

}  // namespace octet::cpu

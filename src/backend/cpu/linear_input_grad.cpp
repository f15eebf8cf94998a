// The gradient of a linear layer's input: contracts over the outputs of all weights of a group, 128
// at a time; a chunk never spans two weights.
#include <algorithm>
#include <functional>

#include "backend/cpu/linear_blocks.h"
#include "backend/cpu/matrix_checks.h"
#include "backend/cpu/ops.h"
#include "base/error.h"

namespace octet::cpu {
namespace {

using tensor::Granularity;
using tensor::kScaleBlock;

class InputGrad {
 public:
  InputGrad(Context& context, const ops::LinearInputGradArgs& args)
      : context_(context),
        codec_(codec_kernels(context.isa)),
        gemm_(gemm_kernels(context.isa)),
        args_(args),
        tokens_(args.dy.shape[0]),
        outputs_(args.dy.shape[1]),
        columns_(args.dx.shape[1]),
        dy_stride_(outputs_ + kRowPadding) {
    for (const ops::Weight& weight : args.weights) {
      num_chunks_ += divide_up(weight.rows(), kScaleBlock);
    }
  }

  void run() {
    const int64_t most = std::min(tokens_, rows_at_a_time(dy_stride_));
    dy_ = context_.shared_scratch[0].take<float>(most * dy_stride_);
    dy_scales_ = context_.shared_scratch[1].take<float>(most * num_chunks_);
    for (first_token_ = 0; first_token_ < tokens_; first_token_ += most) {
      num_rows_ = std::min(most, tokens_ - first_token_);
      context_.pool.parallel_for(
          num_rows_, grain_for(outputs_),
          [this](int64_t begin, int64_t end, int thread) { load_tokens(begin, end, thread); });
      const int64_t row_blocks = divide_up(num_rows_, kRowsPerTask);
      const int64_t width = stripe_columns(columns_, row_blocks, context_.pool.num_threads());
      const int64_t cost = std::min(num_rows_, kRowsPerTask) * width * outputs_;
      const auto body = [&](int64_t begin, int64_t end, int thread) {
        for (int64_t task = begin; task < end; ++task) {
          product(task / row_blocks * width, width, task % row_blocks * kRowsPerTask, thread);
        }
      };
      context_.pool.parallel_for(divide_up(columns_, width) * row_blocks, grain_for(cost),
                                 std::ref(body));
    }
  }

 private:
  bool in_fp8(const ops::Weight& weight) const {
    return weight.is_quantized() && !args_.dequantize;
  }

  // dy as F32: its values, or the values of its codes with a scale for each chunk.
  void load_tokens(int64_t first, int64_t last, int thread) {
    uint8_t* codes = context_.thread_scratch[thread].take<uint8_t>(outputs_);
    ops::QuantizeCounters counters;
    for (int64_t row = first; row < last; ++row) {
      float* values = dy_ + row * dy_stride_;
      float* scales = dy_scales_ + row * num_chunks_;
      int64_t output = 0;
      for (const ops::Weight& weight : args_.weights) {
        const int64_t count = weight.rows();
        const int64_t chunks = divide_up(count, kScaleBlock);
        if (in_fp8(weight)) {
          load_row_as_bf16(codec_, args_.dy, first_token_ + row, output, count, values);
          quantize(weight.quantized, values, scales, codes, counters);
        } else {
          load_row(codec_, args_.dy, first_token_ + row, output, count, values);
          std::fill_n(scales, chunks, 1.0f);
        }
        output += count;
        values += count;
        scales += chunks;
      }
    }
    add_counters(context_.counters, counters);
  }

  // One token's gradient for one weight, in place; `scales` has one entry per chunk.
  void quantize(const tensor::QuantizedView& weight, float* values, float* scales, uint8_t* codes,
                ops::QuantizeCounters& counters) const {
    const int64_t count = weight.rows();
    if (weight.granularity == Granularity::kRow) {
      codec_.multiply(values, weight.scales.as<const float>(), count, values);
    }
    const int64_t width = weight.granularity == Granularity::kBlock ? kScaleBlock : count;
    for (int64_t begin = 0; begin < count; begin += width) {
      const int64_t length = std::min(width, count - begin);
      const float scale = scale_of(codec_.largest(values + begin, length), args_.gradient_format,
                                   args_.scale_format);
      codec_.encode(values + begin, length, scale, args_.gradient_format, codes, counters);
      codec_.decode(codes, length, args_.gradient_format, values + begin);
      for (int64_t i = 0; i < length; i += kScaleBlock) *scales++ = scale;
    }
  }

  // Columns [first_column, first_column + width) of dx for one block of rows: for each chunk of
  // outputs all tiles of columns in turn.
  void product(int64_t first_column, int64_t width, int64_t row, int thread) {
    const int64_t num_columns = std::min(width, columns_ - first_column);
    OuterBlock block;
    block.rows = std::min(kRowsPerTask, num_rows_ - row);
    block.a_row = dy_stride_;
    block.a_column = 1;
    block.b_stride = kTileColumns + kRowPadding;
    block.c_stride = round_up(num_columns, kTileColumns) + kRowPadding;
    block.row_scale_stride = num_chunks_;
    float* scratch = context_.thread_scratch[thread].take<float>(
        kTileColumns + kScaleBlock * block.b_stride + block.rows * block.c_stride);
    float* column_scales = scratch;
    float* panel = scratch + kTileColumns;
    float* sums = panel + kScaleBlock * block.b_stride;
    block.column_scales = column_scales;
    block.b = panel;
    block.a = dy_ + row * dy_stride_;
    block.row_scales = dy_scales_ + row * num_chunks_;
    for (const ops::Weight& weight : args_.weights) {
      const bool scaled = in_fp8(weight) && weight.quantized.granularity != Granularity::kRow;
      for (int64_t output = 0; output < weight.rows(); output += kScaleBlock) {
        block.depth = std::min(kScaleBlock, weight.rows() - output);
        for (int64_t done = 0; done < num_columns; done += kTileColumns) {
          const int64_t column = first_column + done;
          const int64_t count = std::min(kTileColumns, num_columns - done);
          block.columns = round_up(count, 64);
          block.c = sums + done;
          load_panel(weight, output, block.depth, column, count, block.b_stride, panel);
          std::fill_n(column_scales, block.columns,
                      scaled ? scale_at(weight.quantized, output, column) : 1.0f);
          block.ahead =
              done + kTileColumns < num_columns
                  ? part_of_weight(weight, output, block.depth, column + kTileColumns,
                                   std::min(kTileColumns, columns_ - column - count))
                  : part_of_weight(weight, output + block.depth,
                                   std::min(kScaleBlock, weight.rows() - output - block.depth),
                                   first_column, std::min(kTileColumns, num_columns));
          gemm_.outer(block);
        }
        block.first = false;
        block.a += block.depth;
        ++block.row_scales;
      }
    }
    if (block.first) std::fill_n(sums, block.rows * block.c_stride, 0.0f);  // there are no outputs
    FinishBlock out;
    out.sums = sums;
    out.sum_stride = block.c_stride;
    out.rows = block.rows;
    out.columns = num_columns;
    out.alpha = args_.alpha;
    out.accumulate = args_.accumulate;
    out.out_dtype = args_.dx.dtype;
    out.out_stride = args_.dx.row_stride;
    out.out = args_.dx.slice_rows(first_token_ + row, block.rows)
                  .slice_columns(first_column, num_columns)
                  .data;
    gemm_.finish(out);
  }

  // panel [depth, count], zeros up to 128 columns.
  void load_panel(const ops::Weight& weight, int64_t output, int64_t depth, int64_t column,
                  int64_t count, int64_t stride, float* panel) const {
    for (int64_t i = 0; i < depth; ++i, panel += stride) {
      if (args_.dequantize && weight.is_quantized()) {
        dequantize_row(codec_, weight.quantized, output + i, column, count, panel);
        codec_.round_to_bf16(panel, count, panel);
      } else {
        load_weight(codec_, weight, output + i, column, count, panel);
      }
      std::fill(panel + count, panel + kTileColumns, 0.0f);
    }
  }

  Context& context_;
  const CodecKernels& codec_;
  const GemmKernels& gemm_;
  const ops::LinearInputGradArgs& args_;
  int64_t tokens_;
  int64_t outputs_;
  int64_t columns_;
  int64_t dy_stride_;
  int64_t num_chunks_ = 0;
  float* dy_ = nullptr;         // [rows at hand, ΣN]
  float* dy_scales_ = nullptr;  // [rows at hand, chunks]
  int64_t first_token_ = 0;
  int64_t num_rows_ = 0;
};

}  // namespace

void linear_input_grad(Context& context, const ops::LinearInputGradArgs& args) {
  constexpr std::string_view kOp = "linear_input_grad";
  if (args.dx.shape.rank() != 2) {
    fail(kOp, "dx must be a matrix, but is {}", args.dx.shape.to_string());
  }
  const int64_t outputs = check_weights(kOp, args.weights, args.dx.shape[1]);
  check_matrix(kOp, "dx", args.dx, args.dx.shape[0], args.dx.shape[1]);
  check_matrix(kOp, "dy", args.dy, args.dx.shape[0], outputs);
  check_gradient_format(kOp, args.gradient_format);
  InputGrad(context, args).run();
}

}  // namespace octet::cpu

// The gradient of a linear layer's weight: contracts over tokens, a group of at most 128 at a time.
#include <algorithm>
#include <functional>

#include "backend/cpu/linear_blocks.h"
#include "backend/cpu/matrix_checks.h"
#include "backend/cpu/ops.h"
#include "base/error.h"

namespace octet::cpu {
namespace {

using tensor::DType;
using tensor::kScaleBlock;
using tensor::TensorView;

struct TokenGroup {
  int64_t begin;
  int64_t count;
};

// One operand [T, C]: its values, or the values of codes with a scale per group and column.
struct Operand {
  TensorView values;
  int64_t scale_stride = 0;        // columns, rounded up to a whole tile
  const uint8_t* codes = nullptr;  // [T, C]
  const float* scales = nullptr;   // [groups, scale_stride]
  DType format = DType::kE4M3;
};

class WeightGrad {
 public:
  WeightGrad(Context& context, const ops::LinearWeightGradArgs& args)
      : context_(context),
        codec_(codec_kernels(context.isa)),
        gemm_(gemm_kernels(context.isa)),
        args_(args),
        tokens_(args.dy.shape[0]),
        outputs_(args.dy.shape[1]),
        columns_(args.x.shape[1]) {}

  void run() {
    find_groups();
    dy_.values = args_.dy;
    x_.values = args_.x;
    if (args_.quantize) {
      quantize(dy_, args_.gradient_format, 0);
      quantize(x_, DType::kE4M3, 2);
    }
    const int64_t row_blocks = divide_up(outputs_, kRowsPerTask);
    const int64_t width = stripe_columns(columns_, row_blocks, context_.pool.num_threads());
    const int64_t stripes = divide_up(columns_, width);
    const int64_t cost = std::min(outputs_, kRowsPerTask) * width * tokens_;
    const auto body = [&](int64_t begin, int64_t end, int thread) {
      for (int64_t task = begin; task < end; ++task) {
        product(task / stripes * kRowsPerTask, task % stripes * width, width, thread);
      }
    };
    context_.pool.parallel_for(stripes * row_blocks, grain_for(cost), std::ref(body));
    if (args_.dbias.empty()) return;
    context_.pool.parallel_for(divide_up(outputs_, kTileColumns), grain_for(tokens_ * kTileColumns),
                               [this](int64_t begin, int64_t end, int) {
                                 for (int64_t tile = begin; tile < end; ++tile) {
                                   add_bias_gradient(tile * kTileColumns);
                                 }
                               });
  }

 private:
  void find_groups() {
    const int32_t whole[2] = {0, static_cast<int32_t>(tokens_)};
    const std::span<const int32_t> offsets = args_.quantize ? args_.sequence_offsets : whole;
    num_groups_ = 0;
    for (size_t s = 0; s + 1 < offsets.size(); ++s) {
      num_groups_ += divide_up(offsets[s + 1] - offsets[s], kScaleBlock);
    }
    groups_ = context_.shared_scratch[4].take<TokenGroup>(num_groups_);
    TokenGroup* group = groups_;
    for (size_t s = 0; s + 1 < offsets.size(); ++s) {
      for (int64_t begin = offsets[s]; begin < offsets[s + 1]; begin += kScaleBlock) {
        *group++ = {begin, std::min<int64_t>(kScaleBlock, offsets[s + 1] - begin)};
      }
    }
  }

  // Fills the operand's codes and scales, held in shared scratch `index` and `index` + 1.
  void quantize(Operand& operand, DType format, int index) {
    const int64_t columns = operand.values.shape[1];
    operand.format = format;
    operand.scale_stride = round_up(columns, kTileColumns);
    auto* codes = context_.shared_scratch[index].take<uint8_t>(tokens_ * columns);
    auto* scales =
        context_.shared_scratch[index + 1].take<float>(num_groups_ * operand.scale_stride);
    operand.codes = codes;
    operand.scales = scales;
    const int64_t tiles = divide_up(columns, kTileColumns);
    const auto quantize_tile = [&](int64_t index, ops::QuantizeCounters& counters) {
      const TokenGroup group = groups_[index / tiles];
      const int64_t column = index % tiles * kTileColumns;
      const int64_t count = std::min(kTileColumns, columns - column);
      float* scale = scales + index / tiles * operand.scale_stride + column;
      float values[kTileColumns];
      std::fill_n(scale, kTileColumns, 0.0f);
      for (int64_t token = group.begin; token < group.begin + group.count; ++token) {
        load_row_as_bf16(codec_, operand.values, token, column, count, values);
        codec_.largest_by_column(values, count, scale);
      }
      for (int64_t i = 0; i < kTileColumns; ++i) {
        scale[i] = scale_of(scale[i], format, args_.scale_format);
      }
      for (int64_t token = group.begin; token < group.begin + group.count; ++token) {
        load_row_as_bf16(codec_, operand.values, token, column, count, values);
        codec_.encode_by_column(values, count, scale, format, codes + token * columns + column,
                                counters);
      }
    };
    context_.pool.parallel_for(num_groups_ * tiles, grain_for(2 * kScaleBlock * kTileColumns),
                               [this, &quantize_tile](int64_t begin, int64_t end, int) {
                                 ops::QuantizeCounters counters;
                                 for (int64_t i = begin; i < end; ++i) quantize_tile(i, counters);
                                 add_counters(context_.counters, counters);
                               });
  }

  // out [tokens of the group, count], rows `stride` apart, zeros up to `padded` columns.
  void load(const Operand& operand, const TokenGroup& group, int64_t column, int64_t count,
            int64_t padded, int64_t stride, float* out) const {
    for (int64_t i = 0; i < group.count; ++i, out += stride) {
      if (operand.codes != nullptr) {
        const int64_t columns = operand.values.shape[1];
        codec_.decode(operand.codes + (group.begin + i) * columns + column, count, operand.format,
                      out);
      } else {
        load_row(codec_, operand.values, group.begin + i, column, count, out);
      }
      std::fill(out + count, out + padded, 0.0f);
    }
  }

  // dw[output, …) × [first_column, first_column + width): for each group all tiles of columns.
  void product(int64_t output, int64_t first_column, int64_t width, int thread) {
    const int64_t num_columns = std::min(width, columns_ - first_column);
    OuterBlock block;
    block.rows = std::min(kRowsPerTask, outputs_ - output);
    block.a_row = 1;
    block.a_column = kRowsPerTask + kRowPadding;
    block.b_stride = kTileColumns + kRowPadding;
    block.c_stride = round_up(num_columns, kTileColumns) + kRowPadding;
    block.out_stride = args_.dw.row_stride;
    block.alpha = args_.alpha;
    float* scratch = context_.thread_scratch[thread].take<float>(
        kTileColumns + kScaleBlock * (block.a_column + block.b_stride) +
        block.rows * block.c_stride);
    std::fill_n(scratch, kTileColumns, 1.0f);
    block.row_scales = scratch;
    block.column_scales = scratch;
    block.row_scale_stride = 1;
    float* a = scratch + kTileColumns;
    float* b = a + kScaleBlock * block.a_column;
    float* sums = b + kScaleBlock * block.b_stride;
    block.a = a;
    block.b = b;
    for (int64_t g = 0; g < num_groups_; ++g) {
      load(dy_, groups_[g], output, block.rows, block.rows, block.a_column, a);
      block.depth = groups_[g].count;
      block.first = g == 0;
      if (args_.quantize) block.row_scales = dy_.scales + g * dy_.scale_stride + output;
      for (int64_t done = 0; done < num_columns; done += kTileColumns) {
        const int64_t column = first_column + done;
        const int64_t count = std::min(kTileColumns, num_columns - done);
        block.columns = round_up(count, 64);
        block.c = sums + done;
        load(x_, groups_[g], column, count, block.columns, block.b_stride, b);
        if (args_.quantize) block.column_scales = x_.scales + g * x_.scale_stride + column;
        const bool last = g + 1 == num_groups_;
        float* out = args_.dw.row<float>(output) + column;
        const bool whole = count == block.columns;  // the kernel knows whole tiles only
        block.out = last && whole ? out : nullptr;
        gemm_.outer(block);
        if (last && !whole) finish(block, count, out);
      }
    }
  }

  void finish(const OuterBlock& block, int64_t count, float* to) const {
    FinishBlock out;
    out.sums = block.c;
    out.sum_stride = block.c_stride;
    out.rows = block.rows;
    out.columns = count;
    out.alpha = args_.alpha;
    out.accumulate = true;
    out.out = to;
    out.out_stride = block.out_stride;
    gemm_.finish(out);
  }

  // Sums of 128 tokens, added in order.
  void add_bias_gradient(int64_t output) {
    const int64_t count = std::min(kTileColumns, outputs_ - output);
    float total[kTileColumns] = {};
    for (int64_t begin = 0; begin < tokens_; begin += kScaleBlock) {
      float partial[kTileColumns] = {};
      for (int64_t t = begin; t < std::min(begin + kScaleBlock, tokens_); ++t) {
        float values[kTileColumns] = {};
        load_row(codec_, args_.dy, t, output, count, values);
        for (int64_t i = 0; i < kTileColumns; ++i) partial[i] += values[i];
      }
      for (int64_t i = 0; i < kTileColumns; ++i) total[i] += partial[i];
    }
    float* out = args_.dbias.as<float>() + output;
    for (int64_t i = 0; i < count; ++i) out[i] += total[i];
  }

  Context& context_;
  const CodecKernels& codec_;
  const GemmKernels& gemm_;
  const ops::LinearWeightGradArgs& args_;
  int64_t tokens_;
  int64_t outputs_;
  int64_t columns_;
  TokenGroup* groups_ = nullptr;
  int64_t num_groups_ = 0;
  Operand dy_;
  Operand x_;
};

}  // namespace

void linear_weight_grad(Context& context, const ops::LinearWeightGradArgs& args) {
  constexpr std::string_view kOp = "linear_weight_grad";
  if (args.dw.shape.rank() != 2 || args.dw.dtype != DType::kF32) {
    fail(kOp, "dw must be an F32 matrix, but is {} {}", tensor::dtype_name(args.dw.dtype),
         args.dw.shape.to_string());
  }
  const int64_t tokens = args.dy.rows();
  check_matrix(kOp, "dy", args.dy, tokens, args.dw.shape[0]);
  check_matrix(kOp, "x", args.x, tokens, args.dw.shape[1]);
  if (!args.dbias.empty()) check_vector(kOp, "dbias", args.dbias, args.dw.shape[0]);
  if (args.quantize) {
    check_gradient_format(kOp, args.gradient_format);
    const std::span<const int32_t> offsets = args.sequence_offsets;
    if (offsets.empty() || offsets.front() != 0 || offsets.back() != tokens ||
        !std::is_sorted(offsets.begin(), offsets.end())) {
      fail(kOp, "sequence_offsets must rise from 0 to the {} tokens of dy, but do not", tokens);
    }
  }
  WeightGrad(context, args).run();
}

}  // namespace octet::cpu

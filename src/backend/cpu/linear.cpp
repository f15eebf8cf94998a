// The forward product. Weights are decoded to F32 a panel of columns at a time, once for each block
// of rows of x; see gemm_kernels.h for the order of additions.
#include <algorithm>

#include "backend/cpu/gemv_kernels.h"
#include "backend/cpu/linear_blocks.h"
#include "backend/cpu/matrix_checks.h"
#include "backend/cpu/ops.h"
#include "base/error.h"

namespace octet::cpu {
namespace {

using tensor::DType;
using tensor::Granularity;
using tensor::kScaleBlock;

// Columns of a panel: they divide kScaleBlock, so a panel has one row of scales. Each panel reads
// all rows of x again, so wide ones serve many rows; narrow ones leave more tasks to the threads.
constexpr int64_t kPanelColumns = 32;
constexpr int64_t kWidePanelColumns = 64;
constexpr int64_t kDepth = 1024;  // of a panel at most, a multiple of kScaleBlock

void check(const ops::LinearArgs& args, int64_t tokens, int64_t columns) {
  const int64_t outputs = check_weights("linear", args.weights, columns);
  check_matrix("linear", "y", args.y, tokens, outputs);
  if (!args.bias.empty()) check_vector("linear", "bias", args.bias, outputs, true);
  if (!args.x.empty()) check_matrix("linear", "x", args.x, tokens, columns);
  if (!args.xq.empty()) {
    check_codes("linear", "xq", args.xq);
    if (args.xq.rows() != tokens || args.xq.columns() != columns) {
      fail("linear", "xq must be [{}, {}] as x is, but is {}", tokens, columns,
           args.xq.codes.shape.to_string());
    }
  }
  for (const ops::Weight& weight : args.weights) {
    if (!weight.is_quantized()) {
      if (args.x.empty()) fail("linear", "a dense weight needs x, but only xq was given");
      continue;
    }
    if (args.xq.empty()) fail("linear", "a quantised weight needs xq, but only x was given");
    const bool blocks = weight.quantized.granularity == Granularity::kBlock;
    const Granularity given = args.xq.granularity;
    if (blocks ? given != Granularity::kRowBlock
               : given != Granularity::kRow && given != Granularity::kTensor) {
      fail("linear", "a weight of granularity {} needs xq of granularity {}, but it has {}",
           tensor::granularity_name(weight.quantized.granularity),
           blocks ? "row_block" : "row or tensor", tensor::granularity_name(given));
    }
  }
}

class Forward {
 public:
  Forward(Context& context, const ops::LinearArgs& args, int64_t tokens, int64_t columns)
      : context_(context),
        codec_(codec_kernels(context.isa)),
        gemm_(gemm_kernels(context.isa)),
        gemv_(tokens <= kGemvRows ? gemv_kernel(context.isa) : nullptr),
        args_(args),
        tokens_(tokens),
        columns_(columns),
        padded_columns_(round_up(columns, kMaxLanes)),
        x_stride_(padded_columns_ + kRowPadding),
        panel_columns_(tokens > kRowsPerTask ? kWidePanelColumns : kPanelColumns),
        depth_(std::min(padded_columns_, kDepth)) {}

  void run() {
    int64_t panels = 0;
    for (const ops::Weight& weight : args_.weights) {
      panels += divide_up(weight.rows(), panel_columns_);
    }
    load_bias();
    const int64_t most = std::min(tokens_, rows_at_a_time(x_stride_));
    if (!args_.x.empty()) x_ = context_.shared_scratch[0].take<float>(most * x_stride_);
    if (!args_.xq.empty()) xq_ = context_.shared_scratch[1].take<float>(most * x_stride_);
    for (first_token_ = 0; first_token_ < tokens_; first_token_ += most) {
      num_rows_ = std::min(most, tokens_ - first_token_);
      context_.pool.parallel_for(num_rows_, grain_for(columns_),
                                 [this](int64_t begin, int64_t end, int) {
                                   for (int64_t row = begin; row < end; ++row) load_tokens(row);
                                 });
      const int64_t row_blocks = divide_up(num_rows_, kRowsPerTask);
      const int64_t cost = std::min(num_rows_, kRowsPerTask) * panel_columns_ * columns_;
      context_.pool.parallel_for(
          panels * row_blocks, grain_for(cost), [this](int64_t begin, int64_t end, int thread) {
            const int64_t row_blocks = divide_up(num_rows_, kRowsPerTask);
            for (int64_t task = begin; task < end; ++task) {
              product(task / row_blocks, task % row_blocks * kRowsPerTask, thread);
            }
          });
    }
  }

 private:
  void load_bias() {
    if (args_.bias.empty()) return;
    bias_ = args_.bias.as<const float>();
    if (args_.bias.dtype == DType::kF32) return;
    const int64_t count = args_.bias.num_elements();
    float* values = context_.shared_scratch[2].take<float>(count);
    codec_.bf16_to_f32(args_.bias.as<const uint16_t>(), count, values);
    bias_ = values;
  }

  void load_tokens(int64_t row) {
    const int64_t token = first_token_ + row;
    if (x_ != nullptr) {
      float* out = x_ + row * x_stride_;
      load_row(codec_, args_.x, token, 0, columns_, out);
      std::fill(out + columns_, out + padded_columns_, 0.0f);
    }
    if (xq_ != nullptr) {
      float* out = xq_ + row * x_stride_;
      codec_.decode(args_.xq.codes.row<const uint8_t>(token), columns_, args_.xq.codes.dtype, out);
      std::fill(out + columns_, out + padded_columns_, 0.0f);
    }
  }

  // One panel of outputs for one block of rows.
  void product(int64_t panel, int64_t row, int thread) {
    const ops::Weight* weight = args_.weights.data();
    int64_t first_output = 0;  // of the weight, within y
    for (;; ++weight) {
      const int64_t panels = divide_up(weight->rows(), panel_columns_);
      if (panel < panels) break;
      panel -= panels;
      first_output += weight->rows();
    }
    const int64_t output = panel * panel_columns_;  // of the panel, within the weight
    const int64_t num_outputs = std::min(panel_columns_, weight->rows() - output);
    const tensor::QuantizedView& quantized = weight->quantized;
    const bool blocks = weight->is_quantized() && quantized.granularity == Granularity::kBlock;
    const int64_t scale_blocks = divide_up(columns_, kScaleBlock);

    const int64_t num_rows = std::min(kRowsPerTask, num_rows_ - row);
    const int64_t sum_stride = round_up(num_outputs, kDotColumns);
    const int64_t num_sums = num_rows * sum_stride;
    const int64_t panel_stride = depth_ + kRowPadding;
    float* sums = context_.thread_scratch[thread].take<float>(num_sums * (1 + kMaxLanes) +
                                                              panel_columns_ * panel_stride);
    const float* x = (weight->is_quantized() ? xq_ : x_) + row * x_stride_;
    const float* x_scales = nullptr;
    const float* scales = nullptr;
    if (blocks) {
      x_scales = args_.xq.scales.as<const float>() + (first_token_ + row) * scale_blocks;
      scales = quantized.scales.as<const float>() + output / kScaleBlock * scale_blocks;
    }
    if (gemv_ != nullptr) {
      const tensor::TensorView& b = weight->is_quantized() ? quantized.codes : weight->dense;
      gemv_({.a = x,
             .a_stride = x_stride_,
             .rows = num_rows,
             .b = b.slice_rows(output, num_outputs).data,
             .b_stride = b.row_stride,
             .b_dtype = b.dtype,
             .columns = num_outputs,
             .depth = columns_,
             .sums = sums,
             .sum_stride = sum_stride,
             .a_scales = x_scales,
             .a_scale_stride = scale_blocks,
             .b_scales = scales});
    } else {
      DotBlock block;
      block.rows = num_rows;
      block.columns = sum_stride;
      block.a_stride = x_stride_;
      block.b_stride = panel_stride;
      block.sums = sums;
      block.running = sums + num_sums;
      float* panel_values = block.running + num_sums * kMaxLanes;
      block.b = panel_values;
      block.a_scale_stride = scale_blocks;
      int64_t begin = 0;
      do {
        const int64_t end = std::min(begin + depth_, padded_columns_);
        load_panel(*weight, output, num_outputs, begin, end, panel_stride, panel_values);
        block.first = begin == 0;
        block.last = end == padded_columns_;
        block.a = x + begin;
        block.depth = end - begin;
        if (blocks) {
          block.a_scales = x_scales + begin / kScaleBlock;
          block.b_scales = scales + begin / kScaleBlock;
        }
        block.ahead = after(*weight, output, num_outputs, end);
        gemm_.dot(block);
        begin = end;
      } while (begin < padded_columns_);
    }

    FinishBlock out;
    out.sums = sums;
    out.sum_stride = sum_stride;
    out.rows = num_rows;
    out.columns = num_outputs;
    if (weight->is_quantized() && !blocks) {
      out.column_scale_stride = quantized.granularity == Granularity::kRow ? 1 : 0;
      out.column_scales = quantized.scales.as<const float>() + output * out.column_scale_stride;
      out.row_scale_stride = args_.xq.granularity == Granularity::kRow ? 1 : 0;
      out.row_scales =
          args_.xq.scales.as<const float>() + (first_token_ + row) * out.row_scale_stride;
    }
    out.alpha = args_.alpha;
    if (bias_ != nullptr) out.bias = bias_ + first_output + output;
    out.accumulate = args_.accumulate;
    out.out_dtype = args_.y.dtype;
    out.out_stride = args_.y.row_stride;
    out.out = args_.y.slice_rows(first_token_ + row, num_rows)
                  .slice_columns(first_output + output, num_outputs)
                  .data;
    gemm_.finish(out);
  }

  // What load_panel reads after a panel that ends before column `end`.
  Ahead after(const ops::Weight& weight, int64_t output, int64_t num_outputs, int64_t end) const {
    if (end >= columns_) {
      end = 0;
      output += num_outputs;
      num_outputs = std::min(panel_columns_, weight.rows() - output);
    }
    return part_of_weight(weight, output, num_outputs, end, std::min(depth_, columns_ - end));
  }

  // panel [outputs, end - begin], zeros after the weight's last column and row.
  void load_panel(const ops::Weight& weight, int64_t output, int64_t num_outputs, int64_t begin,
                  int64_t end, int64_t stride, float* panel) const {
    const int64_t count = std::min(end, columns_) - begin;
    for (int64_t i = 0; i < round_up(num_outputs, kDotColumns); ++i) {
      float* out = panel + i * stride;
      if (i < num_outputs) load_weight(codec_, weight, output + i, begin, count, out);
      std::fill(out + (i < num_outputs ? count : 0), out + (end - begin), 0.0f);
    }
  }

  Context& context_;
  const CodecKernels& codec_;
  const GemmKernels& gemm_;
  GemvKernel gemv_;  // or null: the weights go through panels
  const ops::LinearArgs& args_;
  int64_t tokens_;
  int64_t columns_;
  int64_t padded_columns_;
  int64_t x_stride_;
  int64_t panel_columns_;
  int64_t depth_;
  const float* bias_ = nullptr;
  float* x_ = nullptr;   // the rows at hand as F32
  float* xq_ = nullptr;  // the same of xq, unscaled
  int64_t first_token_ = 0;
  int64_t num_rows_ = 0;
};

}  // namespace

void linear(Context& context, const ops::LinearArgs& args) {
  if (args.x_per_weight) {
    return for_each_weight(args, [&](const ops::LinearArgs& part) { linear(context, part); });
  }
  if (args.x.empty() && args.xq.empty()) fail("linear", "needs x or xq, but was given neither");
  const tensor::Shape& shape = args.x.empty() ? args.xq.codes.shape : args.x.shape;
  if (shape.rank() != 2) fail("linear", "x must be a matrix, but is {}", shape.to_string());
  check(args, shape[0], shape[1]);
  Forward(context, args, shape[0], shape[1]).run();
}

}  // namespace octet::cpu

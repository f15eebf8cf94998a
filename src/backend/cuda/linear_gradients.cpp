// The gradients of a linear layer: the forward's product over transposed operands.
#include <algorithm>
#include <vector>

#include "backend/cuda/checks.h"
#include "backend/cuda/operands.h"
#include "backend/cuda/ops.h"
#include "backend/cuda/transpose.h"

namespace octet::cuda {
namespace {

using tensor::DType;
using tensor::Granularity;
using tensor::kScaleBlock;
using tensor::TensorView;

void check_gradient_format(std::string_view op, DType format) {
  if (format != DType::kE4M3 && format != DType::kE5M2) {
    fail(op, "gradient_format must be F8_E4M3 or F8_E5M2, but is {}", tensor::dtype_name(format));
  }
}

void set_output(Product& product, const TensorView& y, float alpha, bool accumulate) {
  product.y = y.data;
  product.y_is_bf16 = y.dtype == DType::kBF16;
  product.y_stride = y.row_stride;
  product.alpha = alpha;
  product.accumulate = accumulate;
}

// All weights decoded to BF16 side by side: one chain over the whole group.
void dense_input_grad(Context& context, const ops::LinearInputGradArgs& args, int64_t outputs) {
  const int64_t columns = args.dx.shape[1];
  const int64_t padded = round_up(outputs, 8);
  void* transposed = context.scratch(kScratchWeights, 2 * columns * padded);
  int64_t first = 0;
  for (const ops::Weight& weight : args.weights) {
    const bool last = &weight == &args.weights.back();
    if (weight.is_quantized()) {
      transpose_decoded(context, weight.quantized, transposed, padded, first, last);
    } else {
      transpose(context, weight.dense, transposed, padded, first, last);
    }
    first += weight.rows();
  }
  Product product;
  product.weights[0] = {.data = transposed, .stride = padded, .rows = columns};
  product.num_weights = 1;
  int64_t offset = 0;
  context.scratch(kScratchInputs, padded_bytes(args.dy));
  const Rows rows = aligned_rows(context, args.dy, kScratchInputs, offset);
  product.x = rows.data;
  product.x_stride = rows.stride;
  product.num_tokens = args.dy.shape[0];
  product.depth = outputs;
  set_output(product, args.dx, args.alpha, args.accumulate);
  run_product(context, product);
}

// dy quantised for this weight; the product of codes into `y`.
void quantized_input_grad(Context& context, const ops::LinearInputGradArgs& args,
                          const ops::Weight& weight, const TensorView& dy, const TensorView& y,
                          float alpha, bool accumulate) {
  const tensor::QuantizedView& w = weight.quantized;
  const int64_t tokens = dy.shape[0], outputs = weight.rows(), columns = weight.columns();
  const int64_t padded = round_up(outputs, 16), groups = divide_up(outputs, kScaleBlock);
  const bool blocks = w.granularity == Granularity::kBlock;
  const Granularity granularity = blocks ? Granularity::kRowBlock : Granularity::kRow;
  auto* codes = context.scratch<uint8_t>(kScratchInputs, tokens * padded);
  // One 1 after the scales: the weight's own scales of kRow are in dy already.
  const int64_t num_scales = blocks ? tokens * groups : tokens;
  auto* scales = context.scratch<float>(kScratchScales, num_scales + 1);
  const tensor::QuantizedView quantized{
      TensorView(codes, args.gradient_format, {tokens, outputs}, padded),
      TensorView(scales, DType::kF32, tensor::scale_shape(granularity, tokens, outputs)),
      granularity};
  if (padded != outputs) {
    context.fill_zero(codes, tokens * padded);
  }
  quantize(context, {.x = dy,
                     .column_scale = w.granularity == Granularity::kRow ? w.scales : TensorView(),
                     .out = quantized,
                     .scale_format = args.scale_format});
  auto* transposed = context.scratch<uint8_t>(kScratchWeights, columns * padded);
  transpose(context, w.codes, transposed, padded, 0, true);

  Product product;
  product.format = blocks ? ProductFormat::kBlocks : ProductFormat::kScaled;
  product.x_is_e5m2 = args.gradient_format == DType::kE5M2;
  ProductWeight& to = product.weights[0];
  to = {.data = transposed, .stride = padded, .rows = columns};
  product.num_weights = 1;
  if (blocks) {
    to.scales = w.scales.as<float>();
    to.scale_stride = 1;
    to.chunk_stride = divide_up(columns, kScaleBlock);
    to.row_block = kScaleBlock;
  } else if (w.granularity == Granularity::kTensor) {
    to.scales = w.scales.as<float>();
  } else {
    const float one = 1;
    context.upload(&one, scales + num_scales, sizeof(float));
    to.scales = scales + num_scales;
  }
  product.x = codes;
  product.x_stride = padded;
  product.x_scales = scales;
  product.x_scale_stride = blocks ? groups : 1;
  product.num_tokens = tokens;
  product.depth = outputs;
  set_output(product, y, alpha, accumulate);
  run_product(context, product);
}

}  // namespace

void linear_input_grad(Context& context, const ops::LinearInputGradArgs& args) {
  constexpr std::string_view kOp = "linear_input_grad";
  require_rank(kOp, "dx", args.dx, 2, 2);
  require_float(kOp, "dx", args.dx);
  const int64_t tokens = args.dx.shape[0], columns = args.dx.shape[1];
  const int64_t outputs = check_weights(kOp, args.weights, columns);
  require_dtype(kOp, "dy", args.dy, {DType::kBF16});
  require_shape(kOp, "dy", args.dy, {tokens, outputs});
  check_gradient_format(kOp, args.gradient_format);
  if (tokens == 0) return;
  const bool quantized = args.weights[0].is_quantized() && !args.dequantize;
  for (const ops::Weight& weight : args.weights) {
    if (weight.is_quantized() != args.weights[0].is_quantized()) {
      fail(kOp, "the weights of a group must be all dense or all quantised on CUDA");
    }
  }
  if (!quantized) return dense_input_grad(context, args, outputs);
  if (args.weights.size() == 1) {
    return quantized_input_grad(context, args, args.weights[0], args.dy, args.dx, args.alpha,
                                args.accumulate);
  }
  auto* sums = context.scratch<float>(kScratchSums, tokens * columns);
  const TensorView sums_view(sums, DType::kF32, {tokens, columns});
  int64_t column = 0;
  for (const ops::Weight& weight : args.weights) {
    quantized_input_grad(context, args, weight, args.dy.slice_columns(column, weight.rows()),
                         sums_view, 1.0f, column > 0);
    column += weight.rows();
  }
  finish_sums(context, sums, args.dx, args.alpha, args.accumulate);
}

void linear_weight_grad(Context& context, const ops::LinearWeightGradArgs& args) {
  constexpr std::string_view kOp = "linear_weight_grad";
  require_rank(kOp, "dw", args.dw, 2, 2);
  require_dtype(kOp, "dw", args.dw, {DType::kF32});
  const int64_t outputs = args.dw.shape[0], columns = args.dw.shape[1], tokens = args.dy.rows();
  require_dtype(kOp, "dy", args.dy, {DType::kBF16});
  require_shape(kOp, "dy", args.dy, {tokens, outputs});
  require_dtype(kOp, "x", args.x, {DType::kBF16});
  require_shape(kOp, "x", args.x, {tokens, columns});
  if (!args.dbias.empty()) require_vector(kOp, "dbias", args.dbias, DType::kF32, outputs);
  if (tokens == 0) return;

  Product product;
  product.num_weights = 1;
  product.weights[0].rows = columns;
  product.num_tokens = outputs;
  set_output(product, args.dw, args.alpha, true);
  if (args.quantize) {
    check_gradient_format(kOp, args.gradient_format);
    const std::span<const int32_t> offsets = args.sequence_offsets;
    if (offsets.empty() || offsets.front() != 0 || offsets.back() != tokens ||
        !std::is_sorted(offsets.begin(), offsets.end())) {
      fail(kOp, "sequence_offsets must rise from 0 to the {} tokens of dy, but do not", tokens);
    }
    std::vector<int32_t> first, length;
    for (size_t s = 0; s + 1 < offsets.size(); ++s) {
      for (int32_t begin = offsets[s]; begin < offsets[s + 1]; begin += kScaleBlock) {
        first.push_back(begin);
        length.push_back(std::min<int32_t>(kScaleBlock, offsets[s + 1] - begin));
      }
    }
    const auto count = static_cast<int64_t>(first.size());
    const int64_t padded = count * kScaleBlock;
    auto* layout = context.scratch<int32_t>(kScratchSums, 2 * count);
    context.upload(first.data(), layout, 4 * count);
    context.upload(length.data(), layout + count, 4 * count);
    const TokenGroups groups{layout, layout + count, count};
    auto* x_codes = context.scratch<uint8_t>(kScratchWeights, columns * padded);
    auto* dy_codes = context.scratch<uint8_t>(kScratchInputs, outputs * padded);
    auto* x_scales = context.scratch<float>(kScratchScales, columns * count);
    auto* dy_scales = context.scratch<float>(kScratchScales2, outputs * count);
    quantize_transposed(context, args.x, groups, DType::kE4M3, args.scale_format, x_codes,
                        x_scales);
    quantize_transposed(context, args.dy, groups, args.gradient_format, args.scale_format, dy_codes,
                        dy_scales);
    product.format = ProductFormat::kBlocks;
    product.x_is_e5m2 = args.gradient_format == DType::kE5M2;
    product.weights[0].data = x_codes;
    product.weights[0].stride = padded;
    product.weights[0].scales = x_scales;
    product.weights[0].scale_stride = count;
    product.x = dy_codes;
    product.x_stride = padded;
    product.x_scales = dy_scales;
    product.x_scale_stride = count;
    product.depth = padded;
  } else {
    const int64_t padded = round_up(tokens, 8);
    void* x = context.scratch(kScratchWeights, 2 * columns * padded);
    void* dy = context.scratch(kScratchInputs, 2 * outputs * padded);
    transpose(context, args.x, x, padded, 0, true);
    transpose(context, args.dy, dy, padded, 0, true);
    product.weights[0].data = x;
    product.weights[0].stride = padded;
    product.x = dy;
    product.x_stride = padded;
    product.depth = tokens;
  }
  run_product(context, product);
  if (!args.dbias.empty()) add_column_sums(context, args.dy, args.dbias.as<float>());
}

}  // namespace octet::cuda

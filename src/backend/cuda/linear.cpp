// The forward product.
#include <algorithm>

#include "backend/cuda/checks.h"
#include "backend/cuda/operands.h"
#include "backend/cuda/ops.h"
#include "backend/cuda/transpose.h"

namespace octet::cuda {

using tensor::DType;
using tensor::Granularity;
using tensor::kScaleBlock;
using tensor::TensorView;

int64_t check_weights(std::string_view op, std::span<const ops::Weight> weights, int64_t columns) {
  if (weights.empty()) fail(op, "needs at least one weight, but was given none");
  int64_t rows = 0;
  for (const ops::Weight& weight : weights) {
    if (weight.is_quantized()) {
      require_codes(op, "a weight", weight.quantized);
      require_dtype(op, "a weight's codes", weight.quantized.codes, {DType::kE4M3});
      if (weight.quantized.granularity == Granularity::kRowBlock) {
        fail(op, "a weight's granularity must be tensor, row or block, but is row_block");
      }
    } else {
      require_rank(op, "a weight", weight.dense, 2, 2);
      require_dtype(op, "a dense weight", weight.dense, {DType::kBF16});
    }
    if (weight.columns() != columns) {
      fail(op, "a weight must have {} columns, but has {}", columns, weight.columns());
    }
    rows += weight.rows();
  }
  return rows;
}

bool is_aligned(const TensorView& view) {
  const int64_t bytes = tensor::dtype_bytes(view.dtype);
  const auto address = static_cast<int64_t>(reinterpret_cast<intptr_t>(view.data));
  return address % 16 == 0 && (view.row_stride * bytes % 16 == 0 || view.rows() <= 1) &&
         view.shape[1] * bytes % 16 == 0;
}

int64_t padded_bytes(const TensorView& view) {
  if (is_aligned(view)) return 0;
  return view.shape[0] * round_up(view.shape[1] * tensor::dtype_bytes(view.dtype), 16);
}

Rows aligned_rows(Context& context, const TensorView& view, ScratchSlot slot, int64_t& offset) {
  if (is_aligned(view)) return {view.data, view.row_stride};
  const int64_t bytes = tensor::dtype_bytes(view.dtype);
  const int64_t padded = round_up(view.shape[1] * bytes, 16) / bytes;
  char* to = static_cast<char*>(context.scratch(slot, 0)) + offset;
  pad_rows(context, view, to, padded);
  offset += padded_bytes(view);
  return {to, padded};
}

namespace {

void check(const ops::LinearArgs& args, int64_t tokens, int64_t columns) {
  constexpr std::string_view kOp = "linear";
  const int64_t outputs = check_weights(kOp, args.weights, columns);
  require_float(kOp, "y", args.y);
  require_shape(kOp, "y", args.y, {tokens, outputs});
  if (!args.bias.empty()) {
    require_float(kOp, "bias", args.bias);
    if (args.bias.num_elements() != outputs) {
      fail(kOp, "bias must have {} elements, but is {}", outputs, args.bias.shape.to_string());
    }
  }
  if (!args.x.empty()) {
    require_dtype(kOp, "x", args.x, {DType::kBF16});
    const int64_t count = args.x_per_weight ? static_cast<int64_t>(args.weights.size()) : 1;
    require_shape(kOp, "x", args.x, {tokens, count * columns});
  }
  if (!args.xq.empty()) {
    require_codes(kOp, "xq", args.xq);
    require_shape(kOp, "xq", args.xq.codes, {tokens, columns});
  }
  for (const ops::Weight& weight : args.weights) {
    if (!weight.is_quantized()) {
      if (args.x.empty()) fail(kOp, "a dense weight needs x, but only xq was given");
      continue;
    }
    if (args.xq.empty()) fail(kOp, "a quantised weight needs xq, but only x was given");
    const bool blocks = weight.quantized.granularity == Granularity::kBlock;
    const Granularity given = args.xq.granularity;
    if (blocks ? given != Granularity::kRowBlock
               : given != Granularity::kRow && given != Granularity::kTensor) {
      fail(kOp, "a weight of granularity {} needs xq of granularity {}, but it has {}",
           tensor::granularity_name(weight.quantized.granularity),
           blocks ? "row_block" : "row or tensor", tensor::granularity_name(given));
    }
  }
}

ProductFormat format_of(const ops::Weight& weight) {
  if (!weight.is_quantized()) return ProductFormat::kBF16;
  return weight.quantized.granularity == Granularity::kBlock ? ProductFormat::kBlocks
                                                             : ProductFormat::kScaled;
}

const TensorView& elements_of(const ops::Weight& weight) {
  return weight.is_quantized() ? weight.quantized.codes : weight.dense;
}

// Whether `next` lies behind `last` in memory as the further rows of one matrix.
bool continues(const ProductWeight& last, const ProductWeight& next, ProductFormat format) {
  const int64_t element_bytes = format == ProductFormat::kBF16 ? 2 : 1;
  if (next.stride != last.stride || next.x_offset != last.x_offset ||
      static_cast<const char*>(last.data) + last.rows * last.stride * element_bytes != next.data) {
    return false;
  }
  switch (format) {
    case ProductFormat::kBF16:
      return true;
    case ProductFormat::kScaled:
      return last.scale_stride == 1 && next.scale_stride == 1 &&
             last.scales + last.rows == next.scales;
    case ProductFormat::kBlocks:
      return last.rows % kScaleBlock == 0 &&
             last.scales + last.rows / kScaleBlock * last.scale_stride == next.scales;
  }
  return false;
}

void add_weight(Product& product, const ProductWeight& weight) {
  if (product.num_weights > 0 &&
      continues(product.weights[product.num_weights - 1], weight, product.format)) {
    product.weights[product.num_weights - 1].rows += weight.rows;
  } else {
    product.weights[product.num_weights++] = weight;
  }
}

}  // namespace

void linear(Context& context, const ops::LinearArgs& args) {
  constexpr std::string_view kOp = "linear";
  if (args.x.empty() && args.xq.empty()) fail(kOp, "needs x or xq, but was given neither");
  TensorView shaped = args.x.empty() ? args.xq.codes : args.x;
  require_rank(kOp, "x", shaped, 2, 2);
  if (args.x_per_weight) {
    const auto count = static_cast<int64_t>(args.weights.size());
    const bool segmented = std::ranges::any_of(args.weights, [](const ops::Weight& weight) {
      return is_segmented(weight.rows(), weight.columns());
    });
    if (count > Product::kMaxWeights || args.x.empty() || !is_aligned(args.x) || segmented ||
        args.weights[0].columns() % 8 != 0) {
      return for_each_weight(args, [&](const ops::LinearArgs& part) { linear(context, part); });
    }
    shaped = shaped.slice_columns(0, shaped.shape[1] / count);
  }
  const int64_t tokens = shaped.shape[0], columns = shaped.shape[1];
  check(args, tokens, columns);
  if (tokens == 0) return;

  // Room for padded copies, where the layout asks for them.
  int64_t weight_bytes = 0, input_bytes = 0;
  for (const ops::Weight& weight : args.weights) weight_bytes += padded_bytes(elements_of(weight));
  if (!args.x.empty()) input_bytes += padded_bytes(args.x);
  if (!args.xq.empty()) input_bytes += padded_bytes(args.xq.codes);
  if (weight_bytes > 0) context.scratch(kScratchWeights, weight_bytes);
  if (input_bytes > 0) context.scratch(kScratchInputs, input_bytes);
  int64_t weight_offset = 0, input_offset = 0;

  // Neighbours of one format go together, as one matrix where they lie so.
  int64_t column = 0;
  for (size_t begin = 0; begin < args.weights.size();) {
    Product product;
    product.format = format_of(args.weights[begin]);
    const auto is_in_segments = [&](const ops::Weight& weight) {
      return !weight.is_quantized() && is_segmented(weight.rows(), columns);
    };
    product.segmented = is_in_segments(args.weights[begin]);
    const int64_t first_column = column;
    size_t end = begin;
    for (; end < args.weights.size() && end < begin + Product::kMaxWeights &&
           format_of(args.weights[end]) == product.format &&
           is_in_segments(args.weights[end]) == product.segmented;
         ++end) {
      const ops::Weight& weight = args.weights[end];
      const Rows rows = aligned_rows(context, elements_of(weight), kScratchWeights, weight_offset);
      ProductWeight to{.data = rows.data, .stride = rows.stride, .rows = weight.rows()};
      if (weight.is_quantized()) {
        to.scales = weight.quantized.scales.as<float>();
        to.scale_stride = product.format == ProductFormat::kBlocks
                              ? divide_up(columns, kScaleBlock)
                              : (weight.quantized.granularity == Granularity::kRow ? 1 : 0);
        to.row_block = product.format == ProductFormat::kBlocks ? kScaleBlock : 1;
      }
      if (args.x_per_weight) to.x_offset = static_cast<int64_t>(end) * columns;
      add_weight(product, to);
      column += weight.rows();
    }
    const bool dense = product.format == ProductFormat::kBF16;
    const Rows rows =
        aligned_rows(context, dense ? args.x : args.xq.codes, kScratchInputs, input_offset);
    product.x = rows.data;
    product.x_stride = rows.stride;
    if (!dense) {
      product.x_is_e5m2 = args.xq.codes.dtype == DType::kE5M2;
      product.x_scales = args.xq.scales.as<float>();
      product.x_scale_stride = args.xq.granularity == Granularity::kRowBlock
                                   ? divide_up(columns, kScaleBlock)
                                   : (args.xq.granularity == Granularity::kRow ? 1 : 0);
    }
    product.num_tokens = tokens;
    product.depth = columns;
    const int64_t element_bytes = tensor::dtype_bytes(args.y.dtype);
    product.y = args.y.as<char>() + first_column * element_bytes;
    product.y_is_bf16 = args.y.dtype == DType::kBF16;
    product.y_stride = args.y.row_stride;
    if (!args.bias.empty()) {
      product.bias_is_bf16 = args.bias.dtype == DType::kBF16;
      product.bias = args.bias.as<char>() + first_column * tensor::dtype_bytes(args.bias.dtype);
    }
    product.settled = args.settled && weight_bytes == 0;
    product.x_settled = product.settled && args.x_settled && input_bytes == 0 && !args.accumulate;
    product.alpha = args.alpha;
    product.accumulate = args.accumulate;
    run_product(context, product);
    begin = end;
  }
}

}  // namespace octet::cuda

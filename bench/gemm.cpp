#include "bench/gemm.h"

#include <algorithm>
#include <functional>

#include "backend/cpu/cpu_backend.h"
#include "base/error.h"
#include "base/rng.h"
#include "bench/limits.h"

namespace octet::bench {
namespace {

using tensor::DType;
using tensor::Granularity;
using tensor::QuantizedView;
using tensor::TensorView;

const std::vector<std::string> kFormats = {"f32", "bf16", "tensor", "channel", "block"};
const std::vector<std::string> kProducts = {"forward", "input_grad", "weight_grad"};

// Buffers of one backend with the views that the ops take.
class Operands {
 public:
  explicit Operands(ops::Backend& backend) : backend_(backend) {}

  TensorView dense(DType dtype, int64_t rows, int64_t columns) {
    buffers_.push_back(backend_.allocator().allocate(dtype, {rows, columns}, "bench"));
    return buffers_.back().view(dtype, {rows, columns});
  }
  TensorView random(DType dtype, int64_t rows, int64_t columns) {
    std::vector<float> values(rows * columns);
    RandomSequence sequence({}, RngUse::kTask);
    for (float& value : values) value = sequence.next_unit() - 0.5f;
    const TensorView as_f32 = dense(DType::kF32, rows, columns);
    backend_.upload(values.data(), as_f32);
    if (dtype == DType::kF32) return as_f32;
    const TensorView converted = dense(dtype, rows, columns);
    backend_.convert(as_f32, converted);
    return converted;
  }
  QuantizedView quantized(const TensorView& x, Granularity granularity) {
    const tensor::Shape shape = tensor::scale_shape(granularity, x.shape[0], x.shape[1]);
    const TensorView codes = dense(DType::kE4M3, x.shape[0], x.shape[1]);
    buffers_.push_back(backend_.allocator().allocate(DType::kF32, shape, "bench"));
    const QuantizedView out{codes, buffers_.back().view(DType::kF32, shape), granularity};
    backend_.quantize({.x = x, .column_scale = {}, .out = out});
    return out;
  }

 private:
  ops::Backend& backend_;
  std::vector<tensor::Buffer> buffers_;
};

// Of the weight, or of its F32 gradient.
int64_t weight_bytes(const std::string& product, const std::string& format,
                     const GemmShape& shape) {
  const int64_t each = product == "weight_grad" || format == "f32" ? 4 : format == "bf16" ? 2 : 1;
  return each * shape.outputs * shape.inputs;
}

double time_product(ops::Backend& backend, const std::string& product, const std::string& format,
                    const GemmShape& shape, const GemmOptions& options) {
  Operands operands(backend);
  const bool fp8 = format != "f32" && format != "bf16";
  const DType dtype = format == "f32" ? DType::kF32 : DType::kBF16;
  const TensorView x = operands.random(dtype, shape.tokens, shape.inputs);
  const TensorView y = operands.random(dtype, shape.tokens, shape.outputs);
  if (product == "weight_grad") {
    const TensorView dw = operands.dense(DType::kF32, shape.outputs, shape.inputs);
    const int32_t offsets[] = {0, static_cast<int32_t>(shape.tokens)};
    return fastest_call(options.num_threads, options.seconds_per_case, [&] {
      backend.linear_weight_grad(
          {.dy = y, .x = x, .dw = dw, .dbias = {}, .sequence_offsets = offsets, .quantize = fp8});
    });
  }
  ops::Weight weight;
  ops::LinearArgs forward{.x = {}, .xq = {}, .weights = {&weight, 1}, .bias = {}, .y = y};
  weight.dense = operands.random(dtype, shape.outputs, shape.inputs);
  if (fp8) {
    const Granularity granularity = format == "tensor"    ? Granularity::kTensor
                                    : format == "channel" ? Granularity::kRow
                                                          : Granularity::kBlock;
    weight.quantized = operands.quantized(weight.dense, granularity);
    forward.xq =
        operands.quantized(x, format == "block" ? Granularity::kRowBlock : Granularity::kRow);
  } else {
    forward.x = x;
  }
  if (product == "forward")
    return fastest_call(options.num_threads, options.seconds_per_case,
                        [&] { backend.linear(forward); });
  return fastest_call(options.num_threads, options.seconds_per_case, [&] {
    backend.linear_input_grad({.dy = y, .weights = {&weight, 1}, .dx = x});
  });
}

void check_names(const char* what, const std::vector<std::string>& given,
                 const std::vector<std::string>& known) {
  for (const std::string& name : given) {
    if (std::find(known.begin(), known.end(), name) == known.end()) {
      std::string list;
      for (const std::string& one : known) list += (list.empty() ? "" : ", ") + one;
      fail_usage("bench gemm", "{} must be of {}, but one is \"{}\"", what, list, name);
    }
  }
}

}  // namespace

std::vector<GemmShape> default_gemm_shapes() {
  std::vector<GemmShape> shapes;
  for (const auto& [outputs, inputs] : {std::pair(512, 512), {576, 1536}, {4096, 4096}}) {
    for (const int tokens : {1, 4, 24, 128, 1024}) shapes.push_back({tokens, outputs, inputs});
  }
  return shapes;
}

GemmReport measure_gemm(const GemmOptions& options) {
  check_names("formats", options.formats, kFormats);
  check_names("products", options.products, kProducts);
  const auto backend =
      cpu::make_cpu_backend({.num_threads = options.num_threads, .isa = options.isa});
  ThreadPool pool(options.num_threads);
  GemmReport report{backend->name(), measure_fma_peak(options.isa), {}};
  for (const std::string& product : options.products.empty() ? kProducts : options.products) {
    for (const std::string& format : options.formats.empty() ? kFormats : options.formats) {
      for (const GemmShape& shape :
           options.shapes.empty() ? default_gemm_shapes() : options.shapes) {
        const double seconds = time_product(*backend, product, format, shape, options);
        const double gigabytes = 1e-9 * static_cast<double>(weight_bytes(product, format, shape));
        const double memory_seconds =
            gigabytes / measure_stream(options.isa, pool, weight_bytes(product, format, shape),
                                       product == "weight_grad" ? Stream::kUpdate : Stream::kRead);
        const double operations = 2e-9 * static_cast<double>(shape.tokens) *
                                  static_cast<double>(shape.outputs * shape.inputs);
        report.rows.push_back({.product = product,
                               .format = format,
                               .shape = shape,
                               .seconds = seconds,
                               .gflops = operations / seconds,
                               .share_of_peak = 0,
                               .limit_gflops = operations / memory_seconds,
                               .limited_by_memory = false,
                               .share_of_limit = 0});
      }
      report.peak_gflops = std::max(report.peak_gflops, measure_fma_peak(options.isa));
    }
  }
  const double peak = report.peak_gflops * options.num_threads;
  for (GemmRow& row : report.rows) {
    row.share_of_peak = row.gflops / peak;
    row.limited_by_memory = row.limit_gflops < peak;
    row.limit_gflops = std::min(row.limit_gflops, peak);
    row.share_of_limit = row.gflops / row.limit_gflops;
  }
  return report;
}

}  // namespace octet::bench

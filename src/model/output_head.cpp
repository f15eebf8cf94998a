#include "model/output_head.h"

#include <algorithm>
#include <numeric>

#include "base/error.h"

namespace octet::model {

using tensor::DType;
using tensor::TensorView;

namespace {

// The likeliest of every row of logits [n, V].
void append_top(ops::Backend& backend, const TensorView& logits, int64_t num_known, int64_t num_top,
                std::vector<TopToken>& top) {
  const int64_t width = logits.shape[1];
  std::vector<float> values(static_cast<size_t>(logits.num_elements()));
  backend.download(logits, values.data());
  std::vector<int32_t> order(static_cast<size_t>(num_known));
  for (int64_t row = 0; row < logits.rows(); ++row) {
    const float* of = values.data() + row * width;
    std::iota(order.begin(), order.end(), 0);
    std::partial_sort(
        order.begin(), order.begin() + num_top, order.end(),
        [of](int32_t a, int32_t b) { return of[a] != of[b] ? of[a] > of[b] : a < b; });
    for (int64_t i = 0; i < num_top; ++i) top.push_back({order[i], of[order[i]]});
  }
}

}  // namespace

OutputHead::OutputHead(tensor::Allocator& allocator, const Model& model, int64_t chunk_rows,
                       int64_t max_tokens, int64_t num_known, bool training)
    : model_(model), chunk_rows_(std::min(chunk_rows, max_tokens)), num_known_(num_known) {
  const DType dtype = model.precision().activation_dtype();
  const io::ModelConfig& config = model.config();
  const auto make = [&](DType type, const tensor::Shape& shape) {
    buffers_.push_back(allocator.allocate(type, shape, "output head"));
    return buffers_.back().view(type, shape);
  };
  rows_ = make(DType::kI32, {chunk_rows_});
  targets_ = make(DType::kI32, {chunk_rows_});
  gathered_ = make(dtype, {chunk_rows_, config.hidden_size});
  logits_ = make(DType::kF32, {chunk_rows_, config.vocab_size});
  log_probs_ = make(DType::kF32, {chunk_rows_});
  entropies_ = make(DType::kF32, {chunk_rows_});
  if (!training) return;
  d_gathered_ = make(dtype, {chunk_rows_, config.hidden_size});
  d_logits_ = dtype == DType::kF32 ? logits_ : make(dtype, {chunk_rows_, config.vocab_size});
  d_log_probs_ = make(DType::kF32, {chunk_rows_});
  d_entropies_ = make(DType::kF32, {chunk_rows_});
}

TensorView OutputHead::logits(ops::Backend& backend, const TensorView& hidden,
                              std::span<const int32_t> rows) {
  const auto count = static_cast<int64_t>(rows.size());
  OCTET_ASSERT(count > 0 && count <= chunk_rows_);
  const TensorView out = logits_.slice_rows(0, count);
  bool in_order = true;
  for (int64_t i = 0; i < count && in_order; ++i) in_order = rows[i] == rows[0] + i;
  const TensorView x = in_order ? hidden.slice_rows(rows[0], count) : gather(backend, hidden, rows);
  const ops::Weight head{model_.head().dense, {}};
  backend.linear({.x = x, .xq = {}, .weights = {&head, 1}, .bias = {}, .y = out, .settled = true});
  return out;
}

TensorView OutputHead::gather(ops::Backend& backend, const TensorView& hidden,
                              std::span<const int32_t> rows) {
  const auto count = static_cast<int64_t>(rows.size());
  const TensorView ids = rows_.slice_rows(0, count);
  backend.upload(rows.data(), ids);
  backend.embedding({hidden, ids, gathered_.slice_rows(0, count)});  // scale 1
  return gathered_.slice_rows(0, count);
}

TokenScores OutputHead::score(ops::Backend& backend, const TensorView& hidden,
                              std::span<const int32_t> rows, std::span<const int32_t> targets,
                              float temperature, int64_t num_top) {
  OCTET_ASSERT(rows.size() == targets.size());
  TokenScores scores;
  scores.log_probs.resize(rows.size());
  scores.entropies.resize(rows.size());
  for (size_t begin = 0; begin < rows.size(); begin += static_cast<size_t>(chunk_rows_)) {
    const size_t count = std::min(rows.size() - begin, static_cast<size_t>(chunk_rows_));
    const auto n = static_cast<int64_t>(count);
    const TensorView chunk = logits(backend, hidden, rows.subspan(begin, count));
    if (num_top > 0) append_top(backend, chunk, num_known_, num_top, scores.top);
    backend.upload(targets.data() + begin, targets_.slice_rows(0, n));
    backend.log_probs({.logits = chunk,
                       .targets = targets_.slice_rows(0, n),
                       .log_probs = log_probs_.slice_rows(0, n),
                       .entropy = entropies_.slice_rows(0, n),
                       .temperature = temperature,
                       .num_known = num_known_});
    backend.download(log_probs_.slice_rows(0, n), scores.log_probs.data() + begin);
    backend.download(entropies_.slice_rows(0, n), scores.entropies.data() + begin);
  }
  return scores;
}

void OutputHead::backward(ops::Backend& backend, const TensorView& hidden,
                          std::span<const int32_t> rows, std::span<const int32_t> targets,
                          float temperature, std::span<const float> d_log_probs,
                          std::span<const float> d_entropies, const TensorView& d_hidden) {
  OCTET_ASSERT(rows.size() == targets.size() && rows.size() == d_log_probs.size());
  backend.fill_zero(d_hidden);
  const ops::Weight head{model_.head().dense, {}};
  for (size_t begin = 0; begin < rows.size(); begin += static_cast<size_t>(chunk_rows_)) {
    const size_t count = std::min(rows.size() - begin, static_cast<size_t>(chunk_rows_));
    const auto n = static_cast<int64_t>(count);
    const TensorView chunk = logits(backend, hidden, rows.subspan(begin, count));
    const TensorView d_logits = d_logits_.slice_rows(0, n);
    const TensorView gathered = gather(backend, hidden, rows.subspan(begin, count));
    const TensorView d_gathered = d_gathered_.slice_rows(0, n);
    backend.upload(targets.data() + begin, targets_.slice_rows(0, n));
    backend.upload(d_log_probs.data() + begin, d_log_probs_.slice_rows(0, n));
    if (!d_entropies.empty()) {
      backend.upload(d_entropies.data() + begin, d_entropies_.slice_rows(0, n));
    }
    backend.log_probs_backward(
        {.logits = chunk,
         .targets = targets_.slice_rows(0, n),
         .dlog_probs = d_log_probs_.slice_rows(0, n),
         .dentropy = d_entropies.empty() ? TensorView() : d_entropies_.slice_rows(0, n),
         .dlogits = d_logits,
         .temperature = temperature,
         .num_known = num_known_});
    backend.linear_input_grad({.dy = d_logits, .weights = {&head, 1}, .dx = d_gathered});
    if (model_.head().trained) {
      const int32_t offsets[] = {0, static_cast<int32_t>(n)};
      backend.linear_weight_grad({.dy = d_logits,
                                  .x = gathered,
                                  .dw = model_.head().gradient,
                                  .dbias = {},
                                  .sequence_offsets = offsets});
    }
    backend.scatter_rows({d_gathered, rows_.slice_rows(0, n), d_hidden});
  }
}

}  // namespace octet::model

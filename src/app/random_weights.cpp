#include "app/random_weights.h"

#include <algorithm>
#include <filesystem>
#include <vector>

#include "base/error.h"
#include "base/rng.h"
#include "io/checkpoint.h"
#include "tensor/codec.h"

namespace octet::app {
namespace {

using tensor::DType;
using tensor::TensorView;

constexpr int64_t kPiece = 1 << 22;       // distinct values
constexpr int64_t kStride = 100003 * 16;  // from one parameter's first value to the next one's

std::vector<float> random_values() {
  std::vector<float> values(kPiece);
  RandomSequence random({.seed = 1}, RngUse::kInit);
  for (float& value : values) value = static_cast<float>(0.02 * random.next_normal());
  return values;
}

float constant_of(model::ParameterKind kind) {
  return kind == model::ParameterKind::kNorm ? 1.0f : 0.0f;
}

// Rows that are set at a time: as many whole granules as the array holds, at least one.
int64_t rows_at_once(const model::Parameter& parameter) {
  const int64_t rows = parameter.shape[0], columns = parameter.shape.num_elements() / rows;
  const int64_t granule = model::WeightStore::row_granule(parameter);
  return std::min(rows, std::max<int64_t>(1, kPiece / columns / granule) * granule);
}

// The array once more behind itself, so that a run of this many may begin anywhere in the first.
int64_t array_elements(model::Model& model) {
  int64_t longest = kPiece;
  for (const model::Parameter& p : model.weights().parameters()) {
    longest = std::max(longest, p.shape.num_elements() / p.shape[0] * rows_at_once(p));
  }
  return kPiece + (longest + kPiece - 1) / kPiece * kPiece;
}

}  // namespace

int64_t random_weights_bytes(model::Model& model) { return 4 * array_elements(model); }

void fill_random_weights(ops::Backend& backend, model::Model& model) {
  const std::vector<float> piece = random_values();
  const int64_t count = array_elements(model);
  const tensor::Buffer buffer = backend.allocator().allocate(DType::kF32, {count}, "random values");
  const TensorView all = buffer.view(DType::kF32, {count});
  for (int64_t begin = 0; begin < count; begin += kPiece) {
    backend.upload(piece.data(), all.slice_rows(begin, kPiece));
  }
  int64_t offset = 0;
  for (model::Parameter& p : model.weights().parameters()) {
    if (p.shape.rank() == 1) {
      const std::vector<float> constant(static_cast<size_t>(p.shape[0]), constant_of(p.kind));
      const tensor::Buffer values = backend.allocator().allocate(DType::kF32, p.shape, "constants");
      backend.upload(constant.data(), values.view(DType::kF32, p.shape));
      model.weights().assign(backend, p, values.view(DType::kF32, p.shape));
      continue;
    }
    const int64_t step = rows_at_once(p);
    for (int64_t row = 0; row < p.shape[0]; row += step) {
      const TensorView values(all.as<float>() + offset, DType::kF32,
                              {std::min(step, p.shape[0] - row), p.shape[1]});
      model.weights().assign(backend, p, values, row);
      offset = (offset + kStride) % kPiece;
    }
  }
  backend.synchronize();
}

void write_random_checkpoint(const std::string& folder, io::ModelConfig config) {
  namespace fs = std::filesystem;
  const std::string config_file = (fs::path(folder) / "config.json").string();
  if (fs::exists(config_file)) return;
  fs::create_directories(folder);
  tensor::PlanningAllocator allocator;
  model::Model model(allocator, config, {}, model::Training::kNone, std::nullopt);
  std::vector<io::TensorSpec> specs;
  int64_t largest = 0;
  for (const model::Parameter& p : model.weights().parameters()) {
    specs.push_back({p.name, DType::kBF16, p.shape});
    largest = std::max(largest, p.shape.num_elements());
  }
  const std::vector<float> piece = random_values();
  std::vector<uint16_t> values(static_cast<size_t>(largest + kPiece));
  for (int64_t i = 0; i < kPiece; ++i) values[i] = tensor::encode_bf16(piece[i]);
  for (size_t i = kPiece; i < values.size(); ++i) values[i] = values[i - kPiece];
  std::vector<uint16_t> constant;
  int64_t offset = 0;
  io::write_checkpoint(folder, specs, [&](const io::TensorSpec& spec) {
    if (spec.shape.rank() == 1) {
      const float value = constant_of(model.weights().find(spec.name)->kind);
      constant.assign(static_cast<size_t>(spec.shape[0]), tensor::encode_bf16(value));
      return TensorView(constant.data(), DType::kBF16, spec.shape);
    }
    offset = (offset + kStride) % kPiece;
    return TensorView(values.data() + offset, DType::kBF16, spec.shape);
  });
  config.dtype = "bfloat16";
  io::write_model_config(folder, config);  // last: with it the folder is whole
}

std::vector<std::vector<int32_t>> random_prompts(int64_t count, int64_t length,
                                                 int64_t vocab_size) {
  RandomSequence random({.seed = 2}, RngUse::kTask);
  std::vector<std::vector<int32_t>> prompts(static_cast<size_t>(count));
  for (std::vector<int32_t>& ids : prompts) {
    for (int64_t t = 0; t < length; ++t) {
      ids.push_back(static_cast<int32_t>(random.next_below(static_cast<uint32_t>(vocab_size))));
    }
  }
  return prompts;
}

}  // namespace octet::app

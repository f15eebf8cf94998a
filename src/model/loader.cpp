#include "model/loader.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <functional>
#include <vector>

#include "base/error.h"
#include "base/rng.h"
#include "tensor/codec.h"

namespace octet::model {
namespace {

using tensor::DType;
using tensor::TensorView;

float read_element(const TensorView& view, int64_t index) {
  switch (view.dtype) {
    case DType::kF32:
      return view.as<float>()[index];
    case DType::kBF16:
      return tensor::decode_bf16(view.as<uint16_t>()[index]);
    default:
      return tensor::decode_f16(view.as<uint16_t>()[index]);
  }
}

// Host values of a tensor as float32; Error unless it is F32, BF16 or F16 and finite.
std::vector<float> read_values(const TensorView& view, const std::string& name) {
  if (view.dtype != DType::kF32 && view.dtype != DType::kBF16 && view.dtype != DType::kF16) {
    fail(name, "the tensor must be F32, BF16 or F16, but is {}; convert the checkpoint",
         tensor::dtype_name(view.dtype));
  }
  std::vector<float> values(static_cast<size_t>(view.num_elements()));
  for (size_t i = 0; i < values.size(); ++i) {
    values[i] = read_element(view, static_cast<int64_t>(i));
    if (!std::isfinite(values[i])) {
      fail(name, "weights must be finite, but element {} is {}; the checkpoint is damaged", i,
           values[i]);
    }
  }
  return values;
}

// Rows of F32 values that go through the staging at a time: whole granules of the parameter, within
// the bytes of the model's largest linear (less than a layer) and a bound.
int64_t staged_rows(Model& model, const Parameter& parameter) {
  int64_t most = 0;
  for (const LinearLayer* layer : model.linear_layers()) {
    most = std::max(most, 4 * layer->weight->shape.num_elements());
  }
  most = std::min(most, int64_t{64} << 20);
  const int64_t rows = std::max<int64_t>(1, parameter.shape[0]);
  const int64_t row_bytes = std::max<int64_t>(1, 4 * parameter.shape.num_elements() / rows);
  const int64_t granule = WeightStore::row_granule(parameter);
  return std::min(rows, std::max<int64_t>(1, most / row_bytes / granule) * granule);
}

// Sets parameters one after another through one staging buffer.
class Assigner {
 public:
  Assigner(ops::Backend& backend, Model& model)
      : backend_(backend),
        model_(model),
        staging_(backend.allocator().allocate(loading_bytes(model), "loading")) {}

  // From bytes of dtype F32 or BF16: `read` gives those of the whole tensor.
  void operator()(Parameter& parameter, DType dtype, const ops::Backend::ReadPiece& read) {
    // What is kept as it is needs no staging.
    if (dtype == DType::kBF16 && parameter.master.empty() && parameter.quantized.empty()) {
      return backend_.upload_pieces(parameter.dense, read);
    }
    const int64_t rows = parameter.shape[0], step = staged_rows(model_, parameter);
    for (int64_t first = 0; first < rows; first += step) {
      const TensorView whole(staging_.data(), dtype, parameter.shape);
      const TensorView some = whole.slice_rows(0, std::min(step, rows - first));
      const int64_t begin = first * whole.row_elements() * tensor::dtype_bytes(dtype);
      backend_.upload_pieces(
          some, [&](int64_t offset, std::span<uint8_t> to) { read(begin + offset, to); });
      model_.weights().assign(backend_, parameter, some, first);
    }
  }
  void operator()(Parameter& parameter, const std::vector<float>& values) {
    (*this)(parameter, DType::kF32, [&](int64_t offset, std::span<uint8_t> to) {
      std::memcpy(to.data(), reinterpret_cast<const uint8_t*>(values.data()) + offset, to.size());
    });
  }

 private:
  ops::Backend& backend_;
  Model& model_;
  tensor::Buffer staging_;
};

// Whether one of `count` 16-bit floats has all the bits of `exponent`: an infinity or NaN.
bool has_special(const uint16_t* values, size_t count, uint16_t exponent) {
  bool found = false;
  for (size_t i = 0; i < count; ++i) found |= (values[i] & exponent) == exponent;
  return found;
}
bool has_special(const uint32_t* values, size_t count) {
  constexpr uint32_t kExponent = 0x7F800000u;
  bool found = false;
  for (size_t i = 0; i < count; ++i) found |= (values[i] & kExponent) == kExponent;
  return found;
}

[[noreturn]] void fail_not_finite(const std::string& name, const TensorView& values,
                                  int64_t first_index) {
  int64_t i = 0;
  while (std::isfinite(read_element(values, i))) ++i;
  fail(name, "weights must be finite, but element {} is {}; the checkpoint is damaged",
       first_index + i, read_element(values, i));
}

// The bytes of a tensor of the file, checked on the way while they are in the processor's caches.
class TensorReader {
 public:
  TensorReader(const io::Checkpoint& checkpoint, const io::TensorSpec& spec)
      : checkpoint_(checkpoint), spec_(spec) {
    if (spec.dtype != DType::kF32 && spec.dtype != DType::kBF16 && spec.dtype != DType::kF16) {
      fail(spec.name, "the tensor must be F32, BF16 or F16, but is {}; convert the checkpoint",
           tensor::dtype_name(spec.dtype));
    }
  }
  // Of what `operator()` gives: F16 comes as F32.
  DType dtype() const { return spec_.dtype == DType::kBF16 ? DType::kBF16 : DType::kF32; }

  void operator()(int64_t offset, std::span<uint8_t> to) const {
    constexpr size_t kSlice = size_t{256} << 10;
    for (; !to.empty(); to = to.subspan(std::min(kSlice, to.size()))) {
      const std::span<uint8_t> slice = to.first(std::min(kSlice, to.size()));
      spec_.dtype == DType::kF16 ? read_f16(offset, slice) : read_plain(offset, slice);
      offset += static_cast<int64_t>(slice.size());
    }
  }

 private:
  void read_plain(int64_t offset, std::span<uint8_t> to) const {
    checkpoint_.read(spec_.name, offset, to);
    const int64_t size = tensor::dtype_bytes(spec_.dtype);
    const auto count = static_cast<int64_t>(to.size()) / size;
    const TensorView values(to.data(), spec_.dtype, {count});
    const bool special = size == 2 ? has_special(values.as<uint16_t>(), to.size() / 2, 0x7F80)
                                   : has_special(values.as<uint32_t>(), to.size() / 4);
    if (special) fail_not_finite(spec_.name, values, offset / size);
  }
  void read_f16(int64_t offset, std::span<uint8_t> to) const {
    std::vector<uint16_t> codes(to.size() / 4);
    checkpoint_.read(spec_.name, offset / 2,
                     {reinterpret_cast<uint8_t*>(codes.data()), 2 * codes.size()});
    if (has_special(codes.data(), codes.size(), 0x7C00)) {
      const TensorView values(codes.data(), DType::kF16, {static_cast<int64_t>(codes.size())});
      fail_not_finite(spec_.name, values, offset / 4);
    }
    auto* values = reinterpret_cast<float*>(to.data());
    for (size_t i = 0; i < codes.size(); ++i) values[i] = tensor::decode_f16(codes[i]);
  }

  const io::Checkpoint& checkpoint_;
  io::TensorSpec spec_;
};

std::vector<float> dequantise(const io::Fp8Linear& linear) {
  const int64_t rows = linear.codes.shape[0];
  const int64_t columns = linear.codes.shape[1];
  const int64_t blocks = (columns + tensor::kScaleBlock - 1) / tensor::kScaleBlock;
  std::vector<float> values(static_cast<size_t>(rows * columns));
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < columns; ++c) {
      const int64_t scale = linear.granularity == tensor::Granularity::kTensor ? 0
                            : linear.granularity == tensor::Granularity::kRow
                                ? r
                                : r / tensor::kScaleBlock * blocks + c / tensor::kScaleBlock;
      values[r * columns + c] =
          tensor::decode_e4m3(linear.codes.as<uint8_t>()[r * columns + c]) * linear.scales[scale];
    }
  }
  return values;
}

void load_fp8_linear(ops::Backend& backend, WeightStore& weights, Parameter& parameter,
                     const io::Fp8Linear& linear, Assigner& assign) {
  if (linear.codes.shape != parameter.shape) {
    fail(parameter.name, "the tensor must have the shape {}, but has {}",
         parameter.shape.to_string(), linear.codes.shape.to_string());
  }
  // One scale is one scale, whether a file means the tensor or its only block.
  const auto num_scales = static_cast<int64_t>(linear.scales.size());
  const bool same_scales =
      !parameter.quantized.empty() && parameter.quantized.scales.num_elements() == num_scales &&
      (num_scales == 1 || parameter.quantized.granularity == linear.granularity);
  if (same_scales && parameter.master.empty()) {
    weights.assign_codes(backend, parameter, linear.codes.data, linear.scales.data());
    return;
  }
  assign(parameter, dequantise(linear));
}

uint64_t name_seed(uint64_t seed, const std::string& name) {
  uint64_t hash = 0xCBF29CE484222325u ^ seed;  // FNV-1a
  for (const unsigned char c : name) hash = (hash ^ c) * 0x100000001B3u;
  return hash;
}

// Host values of what the forward reads, or of the master.
std::vector<float> download_values(ops::Backend& backend, const TensorView& view) {
  std::vector<float> values(static_cast<size_t>(view.num_elements()));
  if (view.dtype == DType::kF32) {
    backend.download(view, values.data());
  } else {
    std::vector<uint16_t> codes(values.size());
    backend.download(view, codes.data());
    for (size_t i = 0; i < codes.size(); ++i) values[i] = tensor::decode_bf16(codes[i]);
  }
  return values;
}

}  // namespace

int64_t loading_bytes(Model& model) {
  int64_t largest = 0;
  for (const Parameter& p : model.weights().parameters()) {
    const int64_t rows = std::max<int64_t>(1, p.shape[0]);
    largest = std::max(largest, 4 * p.shape.num_elements() / rows * staged_rows(model, p));
  }
  return largest;
}

void load_weights(ops::Backend& backend, Model& model, io::Checkpoint& checkpoint) {
  Assigner assign(backend, model);
  for (Parameter& parameter : model.weights().parameters()) {
    if (parameter.kind == ParameterKind::kLora) continue;
    const std::string module = parameter.name.substr(0, parameter.name.rfind('.'));
    if (parameter.kind == ParameterKind::kLinear && io::is_fp8_linear(checkpoint, module)) {
      load_fp8_linear(backend, model.weights(), parameter, io::read_fp8_linear(checkpoint, module),
                      assign);
    } else {
      const TensorReader reader(checkpoint, checkpoint.spec(parameter.name, parameter.shape));
      assign(parameter, reader.dtype(), reader);
    }
  }
  if (model.config().tie_word_embeddings && checkpoint.has("lm_head.weight")) {
    checkpoint.mark_used("lm_head.weight");
  }
  checkpoint.expect_all_used();
}

void init_weights(ops::Backend& backend, Model& model, uint64_t seed, double standard_deviation) {
  Assigner assign(backend, model);
  for (Parameter& parameter : model.weights().parameters()) {
    if (parameter.kind == ParameterKind::kLora) continue;
    std::vector<float> values(static_cast<size_t>(parameter.shape.num_elements()),
                              parameter.kind == ParameterKind::kNorm ? 1.0f : 0.0f);
    if (parameter.shape.rank() == 2) {
      RandomSequence random({.seed = name_seed(seed, parameter.name)}, RngUse::kInit);
      for (float& value : values) {
        value = static_cast<float>(standard_deviation * random.next_normal());
      }
    }
    assign(parameter, values);
  }
}

void init_adapters(ops::Backend& backend, Model& model, uint64_t seed) {
  Assigner assign(backend, model);
  for (const LinearLayer* layer : model.linear_layers()) {
    if (layer->lora.empty()) continue;
    Parameter& a = *layer->lora.a;
    Parameter& b = *layer->lora.b;
    const float bound = 1.0f / std::sqrt(static_cast<float>(a.shape[1]));
    std::vector<float> values(static_cast<size_t>(a.shape.num_elements()));
    RandomSequence random({.seed = name_seed(seed, a.name)}, RngUse::kInit);
    for (float& value : values) value = bound * (2.0f * random.next_unit() - 1.0f);
    assign(a, values);
    assign(b, std::vector<float>(static_cast<size_t>(b.shape.num_elements()), 0.0f));
  }
}

void load_adapters(ops::Backend& backend, Model& model, const io::PeftAdapter& adapter) {
  Assigner assign(backend, model);
  std::vector<const LinearLayer*> open = model.linear_layers();
  std::erase_if(open, [](const LinearLayer* layer) { return layer->lora.empty(); });
  for (const io::LoraModule& module : adapter.modules) {
    const auto found = std::find_if(open.begin(), open.end(), [&](const LinearLayer* layer) {
      return layer->module == module.path;
    });
    if (found == open.end()) {
      fail(module.path,
           "an adapter must belong to a projection of the model, but this one has none; "
           "use the base model that the adapter was made for");
    }
    const LoraPair& pair = (*found)->lora;
    if (module.a.shape != pair.a->shape || module.b.shape != pair.b->shape) {
      fail(module.path,
           "the adapter must have A {} and B {}, but has {} and {}; use the base model "
           "that it was made for",
           pair.a->shape.to_string(), pair.b->shape.to_string(), module.a.shape.to_string(),
           module.b.shape.to_string());
    }
    assign(*pair.a, read_values(module.a, pair.a->name));
    assign(*pair.b, read_values(module.b, pair.b->name));
    open.erase(found);
  }
  if (!open.empty()) {
    fail(open[0]->module, "the model expects an adapter here, but the folder has none for it");
  }
}

void save_weights(ops::Backend& backend, Model& model, const std::string& folder) {
  const Precision& precision = model.precision();
  std::vector<io::TensorSpec> specs;
  for (const Parameter& parameter : model.weights().parameters()) {
    if (parameter.kind == ParameterKind::kLora) continue;
    if (!parameter.quantized.empty() && parameter.master.empty()) {
      fail("save",
           "{} exists only as FP8 codes, so no BF16 checkpoint is written; export the "
           "adapter instead",
           parameter.name);
    }
    specs.push_back({parameter.name, precision.activation_dtype(), parameter.shape});
  }
  io::ModelConfig config = model.config();
  config.dtype = precision.float32 ? "float32" : "bfloat16";
  config.quantization.reset();
  io::write_model_config(folder, config);
  std::vector<float> values;
  std::vector<uint16_t> codes;
  io::write_checkpoint(folder, specs, [&](const io::TensorSpec& spec) {
    const Parameter& parameter = *model.weights().find(spec.name);
    values =
        download_values(backend, parameter.master.empty() ? parameter.dense : parameter.master);
    if (spec.dtype == DType::kF32) return TensorView(values.data(), DType::kF32, spec.shape);
    codes.resize(values.size());
    for (size_t i = 0; i < values.size(); ++i) codes[i] = tensor::encode_bf16(values[i]);
    return TensorView(codes.data(), DType::kBF16, spec.shape);
  });
}

void save_adapters(ops::Backend& backend, Model& model, const std::string& folder) {
  OCTET_ASSERT(model.lora().has_value());
  std::vector<std::vector<float>> values;
  std::vector<io::LoraModule> modules;
  const auto host_copy = [&](const Parameter& parameter) {
    values.push_back(
        download_values(backend, parameter.master.empty() ? parameter.dense : parameter.master));
    return TensorView(values.back().data(), DType::kF32, parameter.shape);
  };
  for (const LinearLayer* layer : model.linear_layers()) {
    if (layer->lora.empty()) continue;
    io::LoraModule& module = modules.emplace_back();
    module.path = layer->module;
    module.a = host_copy(*layer->lora.a);
    module.b = host_copy(*layer->lora.b);
    module.scale = layer->lora.scale;
  }
  io::write_peft_adapter(folder, *model.lora(), modules);
}

}  // namespace octet::model

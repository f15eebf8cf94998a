#include "model/loader.h"

#include <bit>
#include <cmath>
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

// Sets parameters one after another through one F32 staging buffer.
class Assigner {
 public:
  Assigner(ops::Backend& backend, Model& model) : backend_(backend), model_(model) {
    int64_t largest = 0;
    for (const Parameter& p : model.weights().parameters()) {
      largest = std::max(largest, p.shape.num_elements());
    }
    staging_ = backend.allocator().allocate(DType::kF32, {largest}, "loading");
  }
  void operator()(Parameter& parameter, const std::vector<float>& values) {
    const TensorView view = staging_.view(DType::kF32, parameter.shape);
    backend_.upload(values.data(), view);
    model_.weights().assign(backend_, parameter, view);
  }

 private:
  ops::Backend& backend_;
  Model& model_;
  tensor::Buffer staging_;
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

void load_weights(ops::Backend& backend, Model& model, io::Checkpoint& checkpoint) {
  Assigner assign(backend, model);
  for (Parameter& parameter : model.weights().parameters()) {
    if (parameter.kind == ParameterKind::kLora) continue;
    const std::string module = parameter.name.substr(0, parameter.name.rfind('.'));
    if (parameter.kind == ParameterKind::kLinear && io::is_fp8_linear(checkpoint, module)) {
      load_fp8_linear(backend, model.weights(), parameter, io::read_fp8_linear(checkpoint, module),
                      assign);
    } else {
      assign(parameter,
             read_values(checkpoint.view(parameter.name, parameter.shape), parameter.name));
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

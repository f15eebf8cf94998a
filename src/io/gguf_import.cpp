#include "io/gguf_import.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <functional>
#include <limits>
#include <map>
#include <numbers>
#include <set>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "base/error.h"
#include "base/strings.h"
#include "io/checkpoint.h"
#include "io/gguf.h"
#include "io/gguf_tokenizer.h"
#include "io/model_config.h"
#include "tensor/codec.h"

namespace octet::io {
namespace {

namespace fs = std::filesystem;
using tensor::DType;
using tensor::Shape;
using tensor::TensorView;

// Reads `{architecture}.{name}` as a positive integer.
int64_t get_size(const GgufFile& file, const std::string& key) {
  const int64_t value = file.get_int(key);
  if (value < 1 || value > std::numeric_limits<int32_t>::max()) {
    fail(file.path(), "\"{}\" must be a positive integer, but is {}", key, value);
  }
  return value;
}

// GGUF stores what Llama 3 divides each frequency by, not the four numbers it follows from: two of
// them are the same in all of Llama 3, the others are found and the result is checked.
void read_llama3_rope(const GgufFile& file, const GgufTensor& factors, ModelConfig& config) {
  const int64_t half = config.head_dim / 2;
  if (factors.shape != Shape{half}) {
    fail(file.path(), "tensor \"{}\" must have {} values, but has the shape {}", factors.name, half,
         factors.shape.to_string());
  }
  std::vector<float> values(static_cast<size_t>(half));
  gguf_dequantize(factors, values);
  RopeConfig& rope = config.rope;
  rope.type = RopeType::kLlama3;
  rope.factor = values.back();
  rope.low_freq_factor = 1.0;
  rope.high_freq_factor = 4.0;
  rope.original_max_position_embeddings = 8192;
  const auto original = static_cast<double>(rope.original_max_position_embeddings);
  for (int64_t i = 0; i < half; ++i) {
    const double inverse =
        std::pow(rope.theta, -2.0 * static_cast<double>(i) / static_cast<double>(config.head_dim));
    const double wavelength = 2 * std::numbers::pi / inverse;
    double expected = 1;
    if (wavelength > original / rope.low_freq_factor) {
      expected = rope.factor;
    } else if (wavelength >= original / rope.high_freq_factor) {
      const double smooth = (original / wavelength - rope.low_freq_factor) /
                            (rope.high_freq_factor - rope.low_freq_factor);
      expected = 1 / ((1 - smooth) / rope.factor + smooth);
    }
    if (!(std::abs(values[static_cast<size_t>(i)] - expected) <= 1e-3 * expected)) {
      fail(file.path(),
           "\"{}\" must follow the llama3 rule with an original length of 8192, but value {} is {} "
           "instead of {}",
           factors.name, i, values[static_cast<size_t>(i)], expected);
    }
  }
}

void read_rope(const GgufFile& file, const std::string& prefix, ModelConfig& config) {
  config.rope.theta = file.get_float(prefix + "rope.freq_base", 10000.0);
  if (!(config.rope.theta > 0 && std::isfinite(config.rope.theta))) {
    fail(file.path(), "\"{}rope.freq_base\" must be positive, but is {}", prefix,
         config.rope.theta);
  }
  const int64_t dimensions = file.get_int(prefix + "rope.dimension_count", config.head_dim);
  if (dimensions != config.head_dim) {
    fail(file.path(), "\"{}rope.dimension_count\" must be the head's {}, but is {}", prefix,
         config.head_dim, dimensions);
  }
  const std::string scaling = file.get_string(prefix + "rope.scaling.type", "none");
  if (scaling == "linear") {
    config.rope.type = RopeType::kLinear;
    config.rope.factor = file.get_float(prefix + "rope.scaling.factor");
  } else if (scaling != "none") {
    fail(file.path(), "\"{}rope.scaling.type\" must be none or linear, but is \"{}\"", prefix,
         scaling);
  }
  if (const GgufTensor* factors = file.find("rope_freqs.weight"); factors != nullptr) {
    read_llama3_rope(file, *factors, config);
  }
}

ModelConfig read_config(const GgufFile& file) {
  ModelConfig config;
  config.model_type = file.get_string("general.architecture");
  if (config.model_type != "llama" && config.model_type != "qwen2" &&
      config.model_type != "qwen3") {
    fail(file.path(), "the architecture must be llama, qwen2 or qwen3, but is \"{}\"",
         config.model_type);
  }
  const std::string prefix = config.model_type + ".";
  if (file.get_int(prefix + "expert_count", 0) != 0) {
    fail(file.path(), "mixtures of experts are not read, but \"{}expert_count\" is {}", prefix,
         file.get_int(prefix + "expert_count"));
  }
  config.num_hidden_layers = get_size(file, prefix + "block_count");
  constexpr int64_t kMostLayers = 10'000;
  if (config.num_hidden_layers > kMostLayers) {
    fail(file.path(), "\"{}block_count\" must be at most {}, but is {}", prefix, kMostLayers,
         config.num_hidden_layers);
  }
  config.hidden_size = get_size(file, prefix + "embedding_length");
  config.intermediate_size = get_size(file, prefix + "feed_forward_length");
  config.max_position_embeddings = get_size(file, prefix + "context_length");
  config.num_attention_heads = get_size(file, prefix + "attention.head_count");
  config.num_key_value_heads = file.has_key(prefix + "attention.head_count_kv")
                                   ? get_size(file, prefix + "attention.head_count_kv")
                                   : config.num_attention_heads;
  config.head_dim = file.has_key(prefix + "attention.key_length")
                        ? get_size(file, prefix + "attention.key_length")
                        : config.hidden_size / config.num_attention_heads;
  if (config.num_attention_heads % config.num_key_value_heads != 0 || config.head_dim < 2 ||
      config.head_dim % 2 != 0 ||
      file.get_int(prefix + "attention.value_length", config.head_dim) != config.head_dim) {
    fail(file.path(),
         "{} heads of {} over {} key-value heads do not fit: the second must be even and the same "
         "for values, the third divide the first",
         config.num_attention_heads, config.head_dim, config.num_key_value_heads);
  }
  config.rms_norm_eps = file.get_float(prefix + "attention.layer_norm_rms_epsilon");
  config.qk_norm = config.model_type == "qwen3";
  config.attention_bias = file.find("blk.0.attn_q.bias") != nullptr || config.model_type == "qwen2";
  config.attention_output_bias = config.attention_bias && config.model_type != "qwen2";
  config.tie_word_embeddings = file.find("output.weight") == nullptr;
  config.sliding_window.assign(static_cast<size_t>(config.num_hidden_layers),
                               file.get_int(prefix + "attention.sliding_window", 0));
  if (config.sliding_window[0] != 0) {
    fail(file.path(),
         "sliding windows are not read from GGUF, but \"{}attention.sliding_window\" "
         "is {}",
         prefix, config.sliding_window[0]);
  }
  read_rope(file, prefix, config);
  return config;
}

void read_token_ids(const GgufFile& file, ModelConfig& config, GenerationConfig& generation) {
  const auto find_id = [&](const char* name) -> int32_t {
    const std::string key = fmt::format("tokenizer.ggml.{}_token_id", name);
    const int64_t id = file.get_int(key, -1);
    if (id >= config.vocab_size) {
      fail(file.path(), "\"{}\" must be below {}, but is {}", key, config.vocab_size, id);
    }
    return id < 0 ? -1 : static_cast<int32_t>(id);
  };
  config.bos_token_id = find_id("bos");
  config.pad_token_id = find_id("padding");
  if (const int32_t id = find_id("eos"); id >= 0) config.eos_token_ids = {id};
  generation.eos_token_ids = config.eos_token_ids;
  for (const char* name : {"eot", "eom"}) {
    const int32_t id = find_id(name);
    if (id >= 0 && std::ranges::count(generation.eos_token_ids, id) == 0) {
      generation.eos_token_ids.push_back(id);
    }
  }
  if (config.bos_token_id >= 0) generation.bos_token_id = config.bos_token_id;
  if (config.pad_token_id >= 0) generation.pad_token_id = config.pad_token_id;
}

struct Source {
  const GgufTensor* tensor = nullptr;
  int64_t permuted_heads = 0;  // rows are stored in pairs for this many heads; 0: as they are
};
using Sources = std::map<std::string, Source>;

// Every tensor the model has, by its Hugging Face name. Errors name what is missing, of another
// shape or not part of the model.
Sources find_tensors(const GgufFile& file, ModelConfig& config) {
  Sources sources;
  std::set<std::string> used = {"rope_freqs.weight"};
  const auto add = [&](const std::string& from, const std::string& to, const Shape& shape,
                       int64_t permuted_heads = 0) {
    const GgufTensor* tensor = file.find(from);
    if (tensor == nullptr) fail(file.path(), "tensor \"{}\" is required, but missing", from);
    if (tensor->shape != shape) {
      fail(file.path(), "tensor \"{}\" must have the shape {}, but has {}", from, shape.to_string(),
           tensor->shape.to_string());
    }
    used.insert(from);
    sources[to] = {tensor, permuted_heads};
  };
  const GgufTensor* embedding = file.find("token_embd.weight");
  if (embedding != nullptr && embedding->shape.rank() == 2) config.vocab_size = embedding->shape[0];
  const int64_t hidden = config.hidden_size;
  add("token_embd.weight", "model.embed_tokens.weight", {config.vocab_size, hidden});
  add("output_norm.weight", "model.norm.weight", {hidden});
  if (!config.tie_word_embeddings) {
    add("output.weight", "lm_head.weight", {config.vocab_size, hidden});
  }
  const int64_t head_dim = config.head_dim;
  const int64_t query = config.num_attention_heads * head_dim;
  const int64_t key = config.num_key_value_heads * head_dim;
  const bool permuted = config.model_type == "llama";
  const int64_t query_heads = permuted ? config.num_attention_heads : 0;
  const int64_t key_heads = permuted ? config.num_key_value_heads : 0;
  for (int64_t i = 0; i < config.num_hidden_layers; ++i) {
    const std::string from = fmt::format("blk.{}.", i);
    const std::string to = fmt::format("model.layers.{}.", i);
    const std::string attention = to + "self_attn.";
    add(from + "attn_norm.weight", to + "input_layernorm.weight", {hidden});
    add(from + "ffn_norm.weight", to + "post_attention_layernorm.weight", {hidden});
    add(from + "attn_q.weight", attention + "q_proj.weight", {query, hidden}, query_heads);
    add(from + "attn_k.weight", attention + "k_proj.weight", {key, hidden}, key_heads);
    add(from + "attn_v.weight", attention + "v_proj.weight", {key, hidden});
    add(from + "attn_output.weight", attention + "o_proj.weight", {hidden, query});
    if (config.attention_bias) {
      add(from + "attn_q.bias", attention + "q_proj.bias", {query}, query_heads);
      add(from + "attn_k.bias", attention + "k_proj.bias", {key}, key_heads);
      add(from + "attn_v.bias", attention + "v_proj.bias", {key});
    }
    if (config.attention_output_bias) {
      add(from + "attn_output.bias", attention + "o_proj.bias", {hidden});
    }
    if (config.qk_norm) {
      add(from + "attn_q_norm.weight", attention + "q_norm.weight", {head_dim});
      add(from + "attn_k_norm.weight", attention + "k_norm.weight", {head_dim});
    }
    add(from + "ffn_gate.weight", to + "mlp.gate_proj.weight", {config.intermediate_size, hidden});
    add(from + "ffn_up.weight", to + "mlp.up_proj.weight", {config.intermediate_size, hidden});
    add(from + "ffn_down.weight", to + "mlp.down_proj.weight", {hidden, config.intermediate_size});
  }
  for (const GgufTensor& tensor : file.tensors()) {
    if (!used.contains(tensor.name)) {
      fail(file.path(), "tensor \"{}\" is no part of the {} architecture as it is read here",
           tensor.name, config.model_type);
    }
  }
  return sources;
}

// Row h·d + t·(d/2) + j of Hugging Face is row h·d + 2j + t of GGUF (t = 0, 1).
void unpermute_rows(const uint8_t* from, uint8_t* to, int64_t heads, int64_t head_dim,
                    int64_t row_bytes) {
  for (int64_t row = 0; row < heads * head_dim; ++row) {
    const int64_t within = row % head_dim;
    const int64_t source = row - within + within % (head_dim / 2) * 2 + within / (head_dim / 2);
    std::memcpy(to + row * row_bytes, from + source * row_bytes, static_cast<size_t>(row_bytes));
  }
}

DType output_dtype(const GgufTensor& tensor, ImportDtype wanted) {
  const DType lossless = gguf_lossless_dtype(tensor);
  if (wanted == ImportDtype::kBFloat16) return DType::kBF16;
  return wanted == ImportDtype::kFloat32 ? DType::kF32 : lossless;
}

// Turns one tensor after the other to its final bytes; a view is valid until the next call.
class Converter {
 public:
  explicit Converter(int64_t head_dim) : head_dim_(head_dim) {}

  TensorView convert(const Source& source, DType dtype) {
    const GgufTensor& tensor = *source.tensor;
    const auto num_elements = static_cast<size_t>(tensor.shape.num_elements());
    const uint8_t* data = tensor.data;
    if (dtype != gguf_lossless_dtype(tensor) || gguf_is_quantized(tensor)) {
      values_.resize(num_elements);
      gguf_dequantize(tensor, values_);
      data = reinterpret_cast<const uint8_t*>(values_.data());
      if (dtype == DType::kBF16) {
        codes_.resize(num_elements);
        std::ranges::transform(values_, codes_.begin(), tensor::encode_bf16);
        data = reinterpret_cast<const uint8_t*>(codes_.data());
      }
    }
    if (source.permuted_heads > 0) {
      const size_t num_bytes = num_elements * static_cast<size_t>(tensor::dtype_bytes(dtype));
      permuted_.resize(num_bytes);
      unpermute_rows(data, permuted_.data(), source.permuted_heads, head_dim_,
                     static_cast<int64_t>(num_bytes) / tensor.shape[0]);
      data = permuted_.data();
    }
    return TensorView(const_cast<uint8_t*>(data), dtype, tensor.shape);
  }

 private:
  int64_t head_dim_;
  std::vector<float> values_;
  std::vector<uint16_t> codes_;
  std::vector<uint8_t> permuted_;
};

std::string config_dtype(DType dtype) {
  return dtype == DType::kF32 ? "float32" : dtype == DType::kF16 ? "float16" : "bfloat16";
}

void write_folder(const GgufFile& file, const std::string& folder, const ImportOptions& options) {
  ModelConfig config = read_config(file);
  const Sources sources = find_tensors(file, config);
  GenerationConfig generation;
  read_token_ids(file, config, generation);
  std::vector<TensorSpec> specs;
  for (const auto& [name, source] : sources) {
    specs.push_back({name, output_dtype(*source.tensor, options.dtype), source.tensor->shape});
  }
  const Source& linear = sources.at("model.layers.0.self_attn.q_proj.weight");
  config.dtype = config_dtype(output_dtype(*linear.tensor, options.dtype));

  write_gguf_tokenizer(file, folder);
  write_model_config(folder, config);
  write_generation_config(folder, generation);
  Converter converter(config.head_dim);
  write_checkpoint(folder, std::move(specs), [&](const TensorSpec& spec) {
    return converter.convert(sources.at(spec.name), spec.dtype);
  });
}

bool is_ours(const fs::path& leftover) {
  for (const auto& item : fs::directory_iterator(leftover)) {
    const std::string name = item.path().filename().string();
    const bool known = name.starts_with("model") || name.starts_with("tokenizer") ||
                       name.starts_with("config.json") ||
                       name.starts_with("generation_config.json");
    if (!known || !item.is_regular_file()) return false;
  }
  return true;
}

}  // namespace

void import_gguf(const std::string& path, const std::string& folder, const ImportOptions& options) {
  const GgufFile file(path);
  fs::path destination = fs::absolute(folder).lexically_normal();
  if (!destination.has_filename()) destination = destination.parent_path();
  const fs::path aside = destination.string() + ".tmp";
  try {
    if (fs::exists(destination) && (!fs::is_directory(destination) || !fs::is_empty(destination))) {
      fail(folder,
           "the destination must not exist or be an empty folder, but it is neither; remove it or "
           "choose another one");
    }
    if (fs::exists(aside)) {
      if (!fs::is_directory(aside) || !is_ours(aside)) {
        fail(aside.string(), "this place is needed while importing, but is taken; remove it");
      }
      fs::remove_all(aside);
    }
    fs::create_directories(aside);
  } catch (const fs::filesystem_error& error) {
    fail(folder, "the folder cannot be made: {}; choose another one", error.code().message());
  }
  std::error_code error;
  try {
    write_folder(file, aside.string(), options);
    fs::rename(aside, destination, error);
    if (error) fail(folder, "the folder cannot be put in place: {}", error.message());
  } catch (...) {
    fs::remove_all(aside, error);
    throw;
  }
}

}  // namespace octet::io

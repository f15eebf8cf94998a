// GGUF to a Hugging Face folder: weights, configs and tokenizer.
#pragma once

#include <string>

namespace octet::io {

enum class ImportDtype {
  kKeep,      // F32, F16 and BF16 tensors as they are, quantised ones as F32 (no loss)
  kBFloat16,  // everything rounded to the nearest BF16, ties to even
  kFloat32,
};

struct ImportOptions {
  ImportDtype dtype = ImportDtype::kKeep;
};

// Writes config.json, generation_config.json, model.safetensors (or shards), tokenizer.json and
// tokenizer_config.json to `folder`, which must not exist or be empty. Everything is written to
// `folder`.tmp and renamed at the end; after a failure nothing is left. Architectures: llama,
// qwen2, qwen3; tokenizers of the "gpt2" (byte-level BPE) kind.
void import_gguf(const std::string& path, const std::string& folder,
                 const ImportOptions& options = {});

}  // namespace octet::io

// The tokenizer inside a GGUF file as Hugging Face files.
#pragma once

#include <string>

#include "io/gguf.h"

namespace octet::io {

// Writes tokenizer.json and tokenizer_config.json to an existing folder. Only the byte-level BPE
// kind ("gpt2") with the pre-tokenizers of GPT-2, SmolLM, Qwen2 and Llama 3 is read; another is an
// Error naming it.
void write_gguf_tokenizer(const GgufFile& file, const std::string& folder);

}  // namespace octet::io

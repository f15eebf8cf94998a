// The safetensors format: a strict reader over a memory map and a streaming writer.
// Layout: u64 header length, JSON header, then the tensors' bytes without gap or overlap
// (https://github.com/huggingface/safetensors, "Format").
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tensor/tensor.h"

namespace octet::io {

using Metadata = std::map<std::string, std::string>;

struct TensorSpec {
  std::string name;
  tensor::DType dtype = tensor::DType::kF32;
  tensor::Shape shape;
};

// One file, mapped read-only. Every rule of the format is checked when it is opened; an Error names
// the file, the tensor, what is required and what was given. Use it from one thread at a time.
class SafetensorsFile {
 public:
  explicit SafetensorsFile(const std::string& path);
  ~SafetensorsFile();
  SafetensorsFile(SafetensorsFile&&) noexcept;
  SafetensorsFile& operator=(SafetensorsFile&&) noexcept;

  const std::string& path() const;
  const std::vector<std::string>& names() const;  // in the order of their bytes
  const Metadata& metadata() const;               // "__metadata__"
  bool has(std::string_view name) const;

  // A view valid as long as this object; its memory must not be written to, and the file must not
  // be cut short meanwhile. Aligned for its element type. Error where the name is missing (with the
  // nearest one), the rank is above four or the element type has no DType (U64, C64, F4 …).
  tensor::TensorView view(std::string_view name) const;

  // What `view` would show, without touching the values; the same errors.
  TensorSpec spec(std::string_view name) const;
  // Reads part of a tensor's bytes, from `offset` on; from several threads at once.
  void read(std::string_view name, int64_t offset, std::span<uint8_t> to) const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

struct NamedTensor {
  std::string name;
  tensor::TensorView view;  // host memory; rows may be strided
};

// Gives the bytes of one tensor in host memory, valid until the next call.
using TensorProducer = std::function<tensor::TensorView(const TensorSpec& spec)>;

inline const Metadata kPytorchMetadata = {{"format", "pt"}};

// Writes one file beside `path`, syncs it and renames it into place; what stood there before
// survives a failure. Tensors are asked for one at a time, in file order: by descending element
// type, then by name, as the reference writer does.
void write_safetensors(const std::string& path, std::vector<TensorSpec> specs,
                       const TensorProducer& produce, const Metadata& metadata = kPytorchMetadata);
void write_safetensors(const std::string& path, const std::vector<NamedTensor>& tensors,
                       const Metadata& metadata = kPytorchMetadata);

}  // namespace octet::io

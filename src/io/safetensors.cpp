#include "io/safetensors.h"

#include <algorithm>
#include <cstring>
#include <optional>
#include <utility>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "base/json.h"
#include "base/strings.h"
#include "io/files.h"

namespace octet::io {
namespace {

using tensor::DType;
using tensor::Shape;
using tensor::TensorView;

constexpr uint64_t kMaxHeaderBytes = 100'000'000;
constexpr uint64_t kMaxBytes = uint64_t{1} << 48;

struct ElementType {
  std::string_view name;
  int bits;
  std::optional<DType> dtype;
};

// In the order of the reference implementation, which writes the last ones first.
constexpr ElementType kElementTypes[] = {
    {"BOOL", 8, DType::kBool},
    {"F4", 4, std::nullopt},
    {"F6_E2M3", 6, std::nullopt},
    {"F6_E3M2", 6, std::nullopt},
    {"U8", 8, DType::kU8},
    {"I8", 8, DType::kI8},
    {"F8_E5M2", 8, DType::kE5M2},
    {"F8_E4M3", 8, DType::kE4M3},
    {"F8_E8M0", 8, DType::kE8M0},
    {"F8_E4M3FNUZ", 8, std::nullopt},
    {"F8_E5M2FNUZ", 8, std::nullopt},
    {"I16", 16, DType::kI16},
    {"U16", 16, DType::kU16},
    {"F16", 16, DType::kF16},
    {"BF16", 16, DType::kBF16},
    {"I32", 32, DType::kI32},
    {"U32", 32, DType::kU32},
    {"F32", 32, DType::kF32},
    {"C64", 64, std::nullopt},
    {"F64", 64, DType::kF64},
    {"I64", 64, DType::kI64},
    {"U64", 64, std::nullopt},
};

const ElementType* find_element_type(std::string_view name) {
  const auto* found = std::ranges::find(kElementTypes, name, &ElementType::name);
  return found == std::end(kElementTypes) ? nullptr : found;
}

struct Entry {
  std::string name;
  const ElementType* type = nullptr;
  std::vector<int64_t> extents;
  uint64_t begin = 0;
  uint64_t end = 0;
};

// A non-negative integer that fits in 48 bits.
uint64_t read_size(const SortedJson& value, const std::string& path, std::string_view name,
                   std::string_view what) {
  if (!value.is_number_unsigned() || value.get<uint64_t>() >= kMaxBytes) {
    fail(path, "tensor \"{}\": {} must be integers from 0 to 2^48, but one is {}", name, what,
         value.dump());
  }
  return value.get<uint64_t>();
}

Entry read_entry(const std::string& path, const std::string& name, const SortedJson& fields) {
  for (const char* key : {"dtype", "shape", "data_offsets"}) {
    if (!fields.is_object() || !fields.contains(key)) {
      fail(path,
           "tensor \"{}\": an object with dtype, shape and data_offsets is required, but "
           "{} is missing",
           name, key);
    }
  }
  Entry entry;
  entry.name = name;
  const SortedJson& dtype = fields["dtype"];
  if (dtype.is_string()) entry.type = find_element_type(dtype.get_ref<const std::string&>());
  if (entry.type == nullptr) {
    fail(path, "tensor \"{}\": dtype must be one of the safetensors format, but is {}", name,
         dtype.dump());
  }
  const SortedJson& offsets = fields["data_offsets"];
  const SortedJson& shape = fields["shape"];
  if (!shape.is_array() || !offsets.is_array() || offsets.size() != 2) {
    fail(path,
         "tensor \"{}\": shape must be a list and data_offsets a list of two, but they are "
         "{} and {}",
         name, shape.dump(), offsets.dump());
  }
  entry.begin = read_size(offsets[0], path, name, "data_offsets");
  entry.end = read_size(offsets[1], path, name, "data_offsets");
  bool empty = false;
  uint64_t num_elements = 1;
  for (const SortedJson& extent : shape) {
    const uint64_t size = read_size(extent, path, name, "the extents of shape");
    entry.extents.push_back(static_cast<int64_t>(size));
    empty = empty || size == 0;
    if (size != 0 && num_elements > kMaxBytes / size) {
      fail(path, "tensor \"{}\": the shape {} is larger than any file", name, shape.dump());
    }
    num_elements *= std::max<uint64_t>(size, 1);
  }
  if (empty) num_elements = 0;
  const uint64_t bits = num_elements * entry.type->bits;
  if (bits % 8 != 0 || entry.end < entry.begin || entry.end - entry.begin != bits / 8) {
    fail(path, "tensor \"{}\": {} of shape {} takes {} bytes, but data_offsets are {}", name,
         entry.type->name, shape.dump(), bits / 8, offsets.dump());
  }
  return entry;
}

Metadata read_metadata(const std::string& path, const SortedJson& object) {
  Metadata metadata;
  if (!object.is_object()) fail(path, "__metadata__ must be an object, but is {}", object.dump());
  for (const auto& [key, value] : object.items()) {
    if (!value.is_string()) {
      fail(path, "__metadata__ must hold strings, but \"{}\" is {}", key, value.dump());
    }
    metadata[key] = value.get<std::string>();
  }
  return metadata;
}

}  // namespace

struct SafetensorsFile::State {
  explicit State(const std::string& path) : file(path) {}
  MappedFile file;
  Metadata metadata;
  const uint8_t* data = nullptr;
  std::vector<Entry> entries;
  std::vector<std::string> names;
  std::map<std::string, size_t, std::less<>> index;
  // Copies of tensors that lie askew in the file.
  std::map<std::string, std::vector<std::max_align_t>> aligned;

  const Entry& find(std::string_view name) const;
};

SafetensorsFile::SafetensorsFile(const std::string& path) : state_(std::make_unique<State>(path)) {
  const std::span<const uint8_t> bytes = state_->file.bytes();
  uint64_t header_bytes = 0;
  if (bytes.size() < sizeof(header_bytes)) {
    fail(path, "a safetensors file starts with 8 bytes of header length, but the file has only {}",
         bytes.size());
  }
  std::memcpy(&header_bytes, bytes.data(), sizeof(header_bytes));
  if (header_bytes > kMaxHeaderBytes) {
    fail(path, "the header may have at most {} bytes, but states {}; is this a safetensors file?",
         kMaxHeaderBytes, header_bytes);
  }
  if (header_bytes > bytes.size() - sizeof(header_bytes)) {
    fail(path, "the header states {} bytes, but only {} follow; the file is cut short",
         header_bytes, bytes.size() - sizeof(header_bytes));
  }
  const std::string_view header(reinterpret_cast<const char*>(bytes.data()) + sizeof(header_bytes),
                                header_bytes);
  if (!header.starts_with('{')) {
    fail(path, "the header must start with \"{{\"; is this a safetensors file?");
  }
  const SortedJson json = parse_sorted_json(header, path);
  for (const auto& [name, fields] : json.items()) {
    if (name == "__metadata__") {
      state_->metadata = read_metadata(path, fields);
    } else {
      state_->entries.push_back(read_entry(path, name, fields));
    }
  }

  std::ranges::stable_sort(state_->entries, [](const Entry& a, const Entry& b) {
    return std::pair(a.begin, a.end) < std::pair(b.begin, b.end);
  });
  const uint64_t data_bytes = bytes.size() - sizeof(header_bytes) - header_bytes;
  uint64_t expected = 0;
  for (const Entry& entry : state_->entries) {
    if (entry.begin != expected) {
      fail(path,
           "tensor \"{}\": its bytes must start at {}, where those before end, but start at "
           "{} ({})",
           entry.name, expected, entry.begin, entry.begin < expected ? "an overlap" : "a hole");
    }
    if (entry.end > data_bytes) {
      fail(path, "tensor \"{}\": its bytes end at {}, but the file has only {}; it is cut short",
           entry.name, entry.end, data_bytes);
    }
    expected = entry.end;
    state_->index[entry.name] = state_->names.size();
    state_->names.push_back(entry.name);
  }
  if (expected != data_bytes) {
    fail(path,
         "the tensors take {} bytes, but the file has {} for them; nothing may follow the "
         "last one",
         expected, data_bytes);
  }
  state_->data = bytes.data() + sizeof(header_bytes) + header_bytes;
}

SafetensorsFile::~SafetensorsFile() = default;
SafetensorsFile::SafetensorsFile(SafetensorsFile&&) noexcept = default;
SafetensorsFile& SafetensorsFile::operator=(SafetensorsFile&&) noexcept = default;

const std::string& SafetensorsFile::path() const { return state_->file.path(); }
const std::vector<std::string>& SafetensorsFile::names() const { return state_->names; }
const Metadata& SafetensorsFile::metadata() const { return state_->metadata; }
bool SafetensorsFile::has(std::string_view name) const { return state_->index.contains(name); }

const Entry& SafetensorsFile::State::find(std::string_view name) const {
  const auto found = index.find(name);
  if (found == index.end()) {
    const std::string near = nearest_name(name, names);
    fail(file.path(), "tensor \"{}\" is required, but missing{}", name,
         near.empty() ? "" : fmt::format("; the nearest is \"{}\"", near));
  }
  return entries[found->second];
}

TensorSpec SafetensorsFile::spec(std::string_view name) const {
  const Entry& entry = state_->find(name);
  if (!entry.type->dtype.has_value()) {
    fail(path(), "tensor \"{}\" has the element type {}, which is not supported", name,
         entry.type->name);
  }
  if (entry.extents.size() > Shape::kMaxRank) {
    fail(path(), "tensor \"{}\" has {} axes, but at most {} are supported", name,
         entry.extents.size(), Shape::kMaxRank);
  }
  return {entry.name, *entry.type->dtype, Shape(entry.extents)};
}

void SafetensorsFile::read(std::string_view name, int64_t offset, std::span<uint8_t> to) const {
  const Entry& entry = state_->find(name);
  const auto begin = static_cast<uint64_t>(offset);
  OCTET_ASSERT(begin + to.size() <= entry.end - entry.begin);
  const auto data_offset = static_cast<uint64_t>(state_->data - state_->file.bytes().data());
  state_->file.read(data_offset + entry.begin + begin, to);
}

TensorView SafetensorsFile::view(std::string_view name) const {
  const TensorSpec tensor = spec(name);
  const Entry& entry = state_->find(name);
  const uint8_t* data = state_->data + entry.begin;
  const auto address = reinterpret_cast<uintptr_t>(data);
  if (address % static_cast<uintptr_t>(tensor::dtype_bytes(tensor.dtype)) != 0) {
    auto& copy = state_->aligned[tensor.name];
    if (copy.empty()) {
      const size_t num_bytes = entry.end - entry.begin;
      copy.resize(num_bytes / sizeof(std::max_align_t) + 1);
      std::memcpy(copy.data(), data, num_bytes);
    }
    data = reinterpret_cast<const uint8_t*>(copy.data());
  }
  return TensorView(const_cast<uint8_t*>(data), tensor.dtype, tensor.shape);
}

void write_safetensors(const std::string& path, std::vector<TensorSpec> specs,
                       const TensorProducer& produce, const Metadata& metadata) {
  const auto rank = [](DType dtype) {
    return find_element_type(tensor::dtype_name(dtype)) - kElementTypes;
  };
  std::ranges::sort(specs, [&](const TensorSpec& a, const TensorSpec& b) {
    return std::pair(-rank(a.dtype), std::string_view(a.name)) <
           std::pair(-rank(b.dtype), std::string_view(b.name));
  });
  std::string header = "{";
  if (!metadata.empty()) header += "\"__metadata__\":" + Json(metadata).dump() + ",";
  std::map<std::string_view, int> seen;
  int64_t offset = 0;
  for (const TensorSpec& spec : specs) {
    if (spec.name == "__metadata__" || ++seen[spec.name] > 1) {
      fail(path, "tensor names must be unique, but \"{}\" is given twice or reserved", spec.name);
    }
    const int64_t begin = offset;
    offset += spec.shape.num_elements() * tensor::dtype_bytes(spec.dtype);
    std::vector<int64_t> extents;
    for (int axis = 0; axis < spec.shape.rank(); ++axis) extents.push_back(spec.shape[axis]);
    header += fmt::format("{}:{{\"dtype\":\"{}\",\"shape\":[{}],\"data_offsets\":[{},{}]}},",
                          Json(spec.name).dump(), tensor::dtype_name(spec.dtype),
                          fmt::join(extents, ","), begin, offset);
  }
  if (header.back() == ',') header.pop_back();
  header += '}';
  header.resize((header.size() + 7) / 8 * 8, ' ');
  if (header.size() > kMaxHeaderBytes) fail(path, "there are too many tensors for one file");

  AsideFile file(path);
  const uint64_t header_bytes = header.size();
  file.write(&header_bytes, sizeof(header_bytes));
  file.write(header.data(), header.size());
  for (const TensorSpec& spec : specs) {
    const TensorView view = produce(spec);
    OCTET_ASSERT(view.dtype == spec.dtype && view.shape == spec.shape);
    const int64_t element_bytes = tensor::dtype_bytes(view.dtype);
    if (view.contiguous()) {
      file.write(view.data, static_cast<size_t>(view.num_bytes()));
      continue;
    }
    for (int64_t row = 0; row < view.rows(); ++row) {
      file.write(static_cast<const char*>(view.data) + row * view.row_stride * element_bytes,
                 static_cast<size_t>(view.row_elements() * element_bytes));
    }
  }
  file.commit();
}

void write_safetensors(const std::string& path, const std::vector<NamedTensor>& tensors,
                       const Metadata& metadata) {
  std::vector<TensorSpec> specs;
  std::map<std::string_view, const TensorView*> views;
  for (const NamedTensor& tensor : tensors) {
    specs.push_back({tensor.name, tensor.view.dtype, tensor.view.shape});
    views[tensor.name] = &tensor.view;
  }
  write_safetensors(
      path, std::move(specs), [&](const TensorSpec& spec) { return *views.at(spec.name); },
      metadata);
}

}  // namespace octet::io

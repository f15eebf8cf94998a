#include "io/gguf.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <map>
#include <optional>
#include <set>
#include <utility>

#include <fmt/format.h>

#include "base/error.h"
#include "base/json.h"
#include "io/files.h"

namespace octet::io {
namespace {

enum ValueType : uint32_t {
  kUint8 = 0,
  kInt8,
  kUint16,
  kInt16,
  kUint32,
  kInt32,
  kFloat32,
  kBool,
  kString,
  kArray,
  kUint64,
  kInt64,
  kFloat64,
  kNumValueTypes,
};

// Bytes of a scalar; 0 for strings and arrays.
constexpr size_t kScalarBytes[kNumValueTypes] = {1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8};

template <class T>
T load(const uint8_t* data) {
  T value;
  std::memcpy(&value, data, sizeof(value));
  return value;
}

// Reads forward through the file and never past its end.
class Cursor {
 public:
  Cursor(const std::string& path, std::span<const uint8_t> bytes) : path_(path), bytes_(bytes) {}

  size_t position() const { return position_; }

  const uint8_t* take(uint64_t num_bytes, std::string_view what) {
    if (num_bytes > bytes_.size() - position_) {
      fail(path_,
           "{} needs {} bytes at offset {}, but the file ends after {}; it is cut short or "
           "damaged",
           what, num_bytes, position_, bytes_.size() - position_);
    }
    const uint8_t* data = bytes_.data() + position_;
    position_ += static_cast<size_t>(num_bytes);
    return data;
  }
  template <class T>
  T read(std::string_view what) {
    return load<T>(take(sizeof(T), what));
  }
  std::string_view read_string(std::string_view what) {
    const auto length = read<uint64_t>(what);
    return {reinterpret_cast<const char*>(take(length, what)), static_cast<size_t>(length)};
  }

 private:
  const std::string& path_;
  std::span<const uint8_t> bytes_;
  size_t position_ = 0;
};

// A checked value that still lies in the file.
struct Value {
  uint32_t type = 0;
  uint32_t element_type = 0;  // of an array
  uint64_t count = 1;
  std::span<const uint8_t> bytes;
};

void skip_items(Cursor& cursor, const std::string& path, std::string_view key, uint32_t type,
                uint64_t count) {
  if (type >= kNumValueTypes || type == kArray) {
    fail(path,
         "key \"{}\": a value type from 0 to 12 and no nested array is required, but it is "
         "{}",
         key, type);
  }
  if (type == kString) {
    for (uint64_t i = 0; i < count; ++i) cursor.read_string(key);
    return;
  }
  if (count > std::numeric_limits<uint64_t>::max() / 8) {
    fail(path, "key \"{}\": an array of {} items cannot be in this file", key, count);
  }
  cursor.take(count * kScalarBytes[type], key);
}

Value read_value(Cursor& cursor, const std::string& path, std::string_view key,
                 std::span<const uint8_t> file) {
  Value value;
  value.type = value.element_type = cursor.read<uint32_t>(key);
  if (value.type == kArray) {
    value.element_type = cursor.read<uint32_t>(key);
    value.count = cursor.read<uint64_t>(key);
  }
  const size_t begin = cursor.position();
  skip_items(cursor, path, key, value.element_type, value.count);
  value.bytes = file.subspan(begin, cursor.position() - begin);
  return value;
}

GgufTensor read_tensor_info(Cursor& cursor, const std::string& path, uint64_t& offset) {
  GgufTensor tensor;
  tensor.name = cursor.read_string("a tensor's name");
  const auto rank = cursor.read<uint32_t>(tensor.name);
  if (rank > tensor::Shape::kMaxRank) {
    fail(path, "tensor \"{}\" must have at most {} axes, but has {}", tensor.name,
         tensor::Shape::kMaxRank, rank);
  }
  std::vector<int64_t> extents;
  uint64_t num_elements = 1;
  for (uint32_t axis = 0; axis < rank; ++axis) {
    const auto extent = cursor.read<uint64_t>(tensor.name);
    constexpr uint64_t kMostElements = uint64_t{1} << 48;
    if (extent == 0 || extent > kMostElements / num_elements) {
      fail(path, "tensor \"{}\" has an axis of {}, which cannot be", tensor.name, extent);
    }
    num_elements *= extent;
    extents.insert(extents.begin(), static_cast<int64_t>(extent));
  }
  tensor.shape = tensor::Shape(extents);
  tensor.type = cursor.read<uint32_t>(tensor.name);
  offset = cursor.read<uint64_t>(tensor.name);
  return tensor;
}

}  // namespace

struct GgufFile::State {
  explicit State(const std::string& path) : file(path) {}

  const Value& require(std::string_view key) const {
    const auto found = values.find(key);
    if (found == values.end()) fail(file.path(), "key \"{}\" is required, but missing", key);
    return found->second;
  }
  [[noreturn]] void wrong_type(std::string_view key, std::string_view required) const {
    fail(file.path(), "key \"{}\" must be {}, but has value type {}", key, required,
         values.find(key)->second.type);
  }

  MappedFile file;
  std::map<std::string, Value, std::less<>> values;
  std::vector<GgufTensor> tensors;
  std::map<std::string, size_t, std::less<>> index;
};

GgufFile::GgufFile(const std::string& path) : state_(std::make_unique<State>(path)) {
  const std::span<const uint8_t> bytes = state_->file.bytes();
  Cursor cursor(path, bytes);
  if (std::memcmp(cursor.take(4, "the magic number"), "GGUF", 4) != 0) {
    fail(path, "a GGUF file starts with \"GGUF\", but this one does not");
  }
  if (const auto version = cursor.read<uint32_t>("the version"); version != 2 && version != 3) {
    fail(path, "GGUF version 2 or 3 (little endian) is required, but this is {}", version);
  }
  const auto num_tensors = cursor.read<uint64_t>("the number of tensors");
  const auto num_values = cursor.read<uint64_t>("the number of keys");
  for (uint64_t i = 0; i < num_values; ++i) {
    const std::string key(cursor.read_string("a key"));
    if (!state_->values.emplace(key, read_value(cursor, path, key, bytes)).second) {
      fail(path, "key \"{}\" must stand once, but stands twice", key);
    }
  }
  std::vector<uint64_t> offsets;
  for (uint64_t i = 0; i < num_tensors; ++i) {
    GgufTensor tensor = read_tensor_info(cursor, path, offsets.emplace_back());
    if (!state_->index.emplace(tensor.name, state_->tensors.size()).second) {
      fail(path, "tensor \"{}\" must stand once, but stands twice", tensor.name);
    }
    state_->tensors.push_back(std::move(tensor));
  }

  const auto alignment = static_cast<uint64_t>(get_int("general.alignment", 32));
  if (alignment == 0 || alignment % 8 != 0 || alignment > (uint64_t{1} << 30)) {
    fail(path, "\"general.alignment\" must be a multiple of 8, but is {}", alignment);
  }
  const uint64_t data_begin = (cursor.position() + alignment - 1) / alignment * alignment;
  const uint64_t data_bytes = data_begin < bytes.size() ? bytes.size() - data_begin : 0;
  std::vector<std::pair<uint64_t, size_t>> order;
  for (size_t i = 0; i < offsets.size(); ++i) {
    GgufTensor& tensor = state_->tensors[i];
    tensor.num_bytes = gguf_tensor_bytes(path, tensor);
    if (offsets[i] % alignment != 0 || offsets[i] > data_bytes ||
        static_cast<uint64_t>(tensor.num_bytes) > data_bytes - offsets[i]) {
      fail(path,
           "tensor \"{}\" takes {} bytes at offset {} (a multiple of {}), but the file has {}; "
           "it is cut short or damaged",
           tensor.name, tensor.num_bytes, offsets[i], alignment, data_bytes);
    }
    tensor.data = bytes.data() + data_begin + offsets[i];
    if (tensor.num_bytes > 0) order.emplace_back(offsets[i], i);
  }
  std::ranges::sort(order);
  for (size_t i = 1; i < order.size(); ++i) {
    const GgufTensor& before = state_->tensors[order[i - 1].second];
    if (order[i].first < order[i - 1].first + static_cast<uint64_t>(before.num_bytes)) {
      fail(path, "tensors \"{}\" and \"{}\" overlap", before.name,
           state_->tensors[order[i].second].name);
    }
  }
}

GgufFile::~GgufFile() = default;
GgufFile::GgufFile(GgufFile&&) noexcept = default;
GgufFile& GgufFile::operator=(GgufFile&&) noexcept = default;

const std::string& GgufFile::path() const { return state_->file.path(); }
const std::vector<GgufTensor>& GgufFile::tensors() const { return state_->tensors; }

const GgufTensor* GgufFile::find(std::string_view name) const {
  const auto found = state_->index.find(name);
  return found == state_->index.end() ? nullptr : &state_->tensors[found->second];
}

bool GgufFile::has_key(std::string_view key) const { return state_->values.contains(key); }

namespace {

std::optional<int64_t> load_int(uint32_t type, const uint8_t* data) {
  switch (type) {
    case kUint8:
      return load<uint8_t>(data);
    case kInt8:
      return load<int8_t>(data);
    case kUint16:
      return load<uint16_t>(data);
    case kInt16:
      return load<int16_t>(data);
    case kUint32:
      return load<uint32_t>(data);
    case kInt32:
      return load<int32_t>(data);
    case kUint64:
      if (load<uint64_t>(data) > uint64_t{std::numeric_limits<int64_t>::max()}) return std::nullopt;
      return static_cast<int64_t>(load<uint64_t>(data));
    case kInt64:
      return load<int64_t>(data);
    default:
      return std::nullopt;
  }
}

}  // namespace

int64_t GgufFile::get_int(std::string_view key) const {
  const Value& value = state_->require(key);
  const std::optional<int64_t> number = load_int(value.type, value.bytes.data());
  if (!number.has_value()) state_->wrong_type(key, "an integer");
  return *number;
}

double GgufFile::get_float(std::string_view key) const {
  const Value& value = state_->require(key);
  if (value.type == kFloat64) return load<double>(value.bytes.data());
  if (value.type != kFloat32) state_->wrong_type(key, "a floating-point number");
  // The decimal number that was meant: 1e-5, not the float32 nearest to it.
  const auto number = load<float>(value.bytes.data());
  return std::isfinite(number) ? std::strtod(json_number(number).c_str(), nullptr) : number;
}

bool GgufFile::get_bool(std::string_view key, bool fallback) const {
  if (!has_key(key)) return fallback;
  const Value& value = state_->require(key);
  if (value.type != kBool) state_->wrong_type(key, "a boolean");
  return load<uint8_t>(value.bytes.data()) != 0;
}

std::string GgufFile::get_string(std::string_view key) const {
  const Value& value = state_->require(key);
  if (value.type != kString) state_->wrong_type(key, "a string");
  return std::string(Cursor(path(), value.bytes).read_string(key));
}

std::vector<std::string> GgufFile::get_strings(std::string_view key) const {
  const Value& value = state_->require(key);
  if (value.type != kArray || value.element_type != kString) {
    state_->wrong_type(key, "an array of strings");
  }
  Cursor cursor(path(), value.bytes);
  std::vector<std::string> strings;
  for (uint64_t i = 0; i < value.count; ++i) strings.emplace_back(cursor.read_string(key));
  return strings;
}

std::vector<int64_t> GgufFile::get_ints(std::string_view key) const {
  const Value& value = state_->require(key);
  std::vector<int64_t> numbers;
  for (uint64_t i = 0; value.type == kArray && i < value.count; ++i) {
    if (value.element_type == kString) state_->wrong_type(key, "an array of integers");
    const size_t offset = static_cast<size_t>(i) * kScalarBytes[value.element_type];
    const auto number = load_int(value.element_type, value.bytes.data() + offset);
    if (!number.has_value()) state_->wrong_type(key, "an array of integers");
    numbers.push_back(*number);
  }
  if (value.type != kArray) state_->wrong_type(key, "an array of integers");
  return numbers;
}

int64_t GgufFile::get_int(std::string_view key, int64_t fallback) const {
  return has_key(key) ? get_int(key) : fallback;
}
double GgufFile::get_float(std::string_view key, double fallback) const {
  return has_key(key) ? get_float(key) : fallback;
}
std::string GgufFile::get_string(std::string_view key, std::string_view fallback) const {
  return has_key(key) ? get_string(key) : std::string(fallback);
}

}  // namespace octet::io

// Writes GGUF files for tests, whole or damaged.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

namespace octet::io {

template <class T>
std::string raw(T value) {
  std::string bytes(sizeof(T), '\0');
  std::memcpy(bytes.data(), &value, sizeof(T));
  return bytes;
}

inline std::string raw_string(const std::string& text) { return raw<uint64_t>(text.size()) + text; }

template <class T>
std::string raw_values(const std::vector<T>& values) {
  std::string bytes;
  for (const T value : values) bytes += raw(value);
  return bytes;
}

class GgufBuilder {
 public:
  uint32_t version = 3;

  void add(const std::string& key, uint32_t type, const std::string& value) {
    values_.push_back(raw_string(key) + raw(type) + value);
  }
  void add_u32(const std::string& key, uint32_t value) { add(key, 4, raw(value)); }
  void add_f32(const std::string& key, float value) { add(key, 6, raw(value)); }
  void add_bool(const std::string& key, bool value) { add(key, 7, raw<uint8_t>(value)); }
  void add_string(const std::string& key, const std::string& value) {
    add(key, 8, raw_string(value));
  }
  void add_strings(const std::string& key, const std::vector<std::string>& values) {
    std::string bytes = raw<uint32_t>(8) + raw<uint64_t>(values.size());
    for (const std::string& value : values) bytes += raw_string(value);
    add(key, 9, bytes);
  }
  void add_i32s(const std::string& key, const std::vector<int32_t>& values) {
    add(key, 9, raw<uint32_t>(5) + raw<uint64_t>(values.size()) + raw_values(values));
  }
  // `extents` innermost first, as the file has them.
  void add_tensor(const std::string& name, const std::vector<uint64_t>& extents, uint32_t type,
                  const std::string& data) {
    infos_.push_back(raw_string(name) + raw(static_cast<uint32_t>(extents.size())) +
                     raw_values(extents) + raw(type) + raw<uint64_t>(data_.size()));
    data_ += data;
    pad(data_);
  }
  void add_f32_tensor(const std::string& name, const std::vector<uint64_t>& extents,
                      const std::vector<float>& values) {
    add_tensor(name, extents, 0, raw_values(values));
  }

  std::string build() const {
    std::string file =
        "GGUF" + raw(version) + raw<uint64_t>(infos_.size()) + raw<uint64_t>(values_.size());
    for (const std::string& value : values_) file += value;
    for (const std::string& info : infos_) file += info;
    pad(file);
    return file + data_;
  }

 private:
  static void pad(std::string& bytes) { bytes.resize((bytes.size() + 31) / 32 * 32, '\0'); }

  std::vector<std::string> values_;
  std::vector<std::string> infos_;
  std::string data_;
};

}  // namespace octet::io

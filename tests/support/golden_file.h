// Reads a safetensors file of reference numbers. Include it in few test files: it brings in JSON.
#pragma once

#include <cstring>
#include <fstream>
#include <iterator>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

namespace octet::test {

struct GoldenTensor {
  std::string dtype;
  std::vector<int64_t> shape;
  std::vector<char> bytes;

  template <class T>
  std::vector<T> as() const {
    std::vector<T> values(bytes.size() / sizeof(T));
    std::memcpy(values.data(), bytes.data(), values.size() * sizeof(T));
    return values;
  }
};

inline std::map<std::string, GoldenTensor> read_golden_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  const std::string all((std::istreambuf_iterator<char>(file)), {});
  if (all.size() < 8) throw std::runtime_error("cannot read " + path);
  uint64_t header_bytes = 0;
  std::memcpy(&header_bytes, all.data(), 8);
  std::map<std::string, GoldenTensor> tensors;
  const auto header = nlohmann::json::parse(all.substr(8, header_bytes));
  for (const auto& [name, entry] : header.items()) {
    if (name == "__metadata__") continue;
    const auto offsets = entry.at("data_offsets").get<std::vector<uint64_t>>();
    const std::string bytes = all.substr(8 + header_bytes + offsets[0], offsets[1] - offsets[0]);
    tensors[name] = {entry.at("dtype"), entry.at("shape"), {bytes.begin(), bytes.end()}};
  }
  return tensors;
}

}  // namespace octet::test

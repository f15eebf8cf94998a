#include "base/crc32c.h"

#include <array>
#include <bit>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <memory>
#include <vector>

#include "base/error.h"

namespace octet {
namespace {

// table[k][b]: the remainder of byte b followed by k zero bytes ("slicing by 8").
using Tables = std::array<std::array<uint32_t, 256>, 8>;

constexpr Tables make_tables() {
  Tables tables{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t remainder = byte;
    for (int bit = 0; bit < 8; ++bit) {
      remainder = (remainder >> 1) ^ ((remainder & 1) != 0 ? 0x82F63B78u : 0u);
    }
    tables[0][byte] = remainder;
  }
  for (size_t k = 1; k < 8; ++k) {
    for (size_t byte = 0; byte < 256; ++byte) {
      const uint32_t previous = tables[k - 1][byte];
      tables[k][byte] = (previous >> 8) ^ tables[0][previous & 0xFF];
    }
  }
  return tables;
}

constexpr Tables kTables = make_tables();

}  // namespace

uint32_t crc32c(std::string_view bytes, uint32_t before) {
  static_assert(std::endian::native == std::endian::little);
  uint32_t crc = ~before;
  const char* data = bytes.data();
  size_t left = bytes.size();
  for (; left >= 8; data += 8, left -= 8) {
    uint64_t word;
    std::memcpy(&word, data, 8);
    word ^= crc;
    crc = 0;
    for (size_t k = 0; k < 8; ++k) crc ^= kTables[7 - k][(word >> (8 * k)) & 0xFF];
  }
  for (; left > 0; ++data, --left) {
    crc = (crc >> 8) ^ kTables[0][(crc ^ static_cast<uint8_t>(*data)) & 0xFF];
  }
  return ~crc;
}

uint32_t crc32c_of_file(const std::string& path) {
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> file(std::fopen(path.c_str(), "rb"),
                                                             &std::fclose);
  if (file == nullptr) fail(path, "the file cannot be read: {}", std::strerror(errno));
  std::vector<char> chunk(1 << 20);
  uint32_t crc = 0;
  for (size_t count; (count = std::fread(chunk.data(), 1, chunk.size(), file.get())) > 0;) {
    crc = crc32c({chunk.data(), count}, crc);
  }
  if (std::ferror(file.get()) != 0) fail(path, "reading the file broke off; check the disk");
  return crc;
}

}  // namespace octet

#include "text/byte_level.h"

#include <array>

#include "text/utf8.h"

namespace octet::text {
namespace {

struct Alphabet {
  std::array<std::string, 256> text;             // by byte, as UTF-8
  std::array<int16_t, kByteAlphabetEnd> byte{};  // by code point; -1 where there is none
};

const Alphabet& alphabet() {
  static const Alphabet table = [] {
    Alphabet result;
    result.byte.fill(-1);
    char32_t next = 0x100;
    for (int byte = 0; byte < 256; ++byte) {
      const bool printable =
          (byte >= 33 && byte <= 126) || (byte >= 161 && byte <= 172) || byte >= 174;
      const char32_t code_point = printable ? static_cast<char32_t>(byte) : next++;
      append_utf8(result.text[byte], code_point);
      result.byte[code_point] = static_cast<int16_t>(byte);
    }
    return result;
  }();
  return table;
}

}  // namespace

std::string bytes_to_alphabet(std::string_view bytes) {
  const Alphabet& table = alphabet();
  std::string text;
  text.reserve(2 * bytes.size());
  for (const char byte : bytes) text += table.text[static_cast<uint8_t>(byte)];
  return text;
}

std::optional<std::string> alphabet_to_bytes(std::string_view text) {
  const Alphabet& table = alphabet();
  std::string bytes;
  for (size_t i = 0; i < text.size();) {
    const CodePoint next = code_point_at(text, i);
    if (!next.valid || next.value >= kByteAlphabetEnd || table.byte[next.value] < 0) return {};
    bytes += static_cast<char>(table.byte[next.value]);
    i += next.length;
  }
  return bytes;
}

}  // namespace octet::text

// GPT-2's printable alphabet for bytes: each of the 256 bytes stands as one character, printable
// ASCII and Latin-1 as themselves and the others, in order, from U+0100 on.
// Source: openai/gpt-2, encoder.py, bytes_to_unicode.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace octet::text {

// The first code point above all of the alphabet's.
constexpr char32_t kByteAlphabetEnd = 0x144;

std::string bytes_to_alphabet(std::string_view bytes);

// The bytes of a token, or nothing where a character is outside the alphabet.
std::optional<std::string> alphabet_to_bytes(std::string_view text);

}  // namespace octet::text

// CRC-32C (Castagnoli, reflected polynomial 0x82F63B78; RFC 3720, appendix B.4).
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace octet {

// The checksum of `bytes`, or of what `before` is the checksum of followed by `bytes`.
uint32_t crc32c(std::string_view bytes, uint32_t before = 0);

// Of a whole file, read piece by piece. Throws Error where it cannot be read.
uint32_t crc32c_of_file(const std::string& path);

}  // namespace octet

// Reading a file through a memory map and writing one aside; for the sources of this folder.
#pragma once

#include <cstdint>
#include <span>
#include <string>

namespace octet::io {

// A regular file mapped read-only. Empty files are an Error.
class MappedFile {
 public:
  explicit MappedFile(const std::string& path);
  ~MappedFile();
  MappedFile(MappedFile&& other) noexcept;
  MappedFile& operator=(MappedFile&&) = delete;

  const std::string& path() const { return path_; }
  std::span<const uint8_t> bytes() const { return {data_, size_}; }
  // Reads `to` from byte `offset` on, past the map: from several threads at once, and no page of
  // the map becomes this process's. Error where the file ends before.
  void read(uint64_t offset, std::span<uint8_t> to) const;

 private:
  std::string path_;
  int file_ = -1;
  const uint8_t* data_ = nullptr;
  size_t size_ = 0;
};

// Writes `path`.tmp; commit() syncs it and renames it into place. Without commit() it is removed
// and what stood at `path` is untouched.
class AsideFile {
 public:
  explicit AsideFile(const std::string& path);
  ~AsideFile();
  AsideFile(const AsideFile&) = delete;
  AsideFile& operator=(const AsideFile&) = delete;

  void write(const void* data, size_t num_bytes);
  void commit();

 private:
  [[noreturn]] void fail_here(const char* what);
  std::string path_;
  std::string temporary_;
  int file_ = -1;
};

}  // namespace octet::io

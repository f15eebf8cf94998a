#include "io/files.h"

#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include <utility>

#include "base/error.h"

namespace octet::io {

MappedFile::MappedFile(const std::string& path) : path_(path) {
  file_ = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (file_ < 0) fail(path, "the file cannot be read: {}; check the path", std::strerror(errno));
  struct stat status {};
  std::string reason;
  if (::fstat(file_, &status) != 0) {
    reason = std::strerror(errno);
  } else if (!S_ISREG(status.st_mode)) {
    reason = "it is no regular file";
  } else if (status.st_size == 0) {
    reason = "it is empty";
  } else {
    size_ = static_cast<size_t>(status.st_size);
    void* data = ::mmap(nullptr, size_, PROT_READ, MAP_PRIVATE, file_, 0);
    if (data == MAP_FAILED) {
      reason = std::strerror(errno);
    } else {
      data_ = static_cast<const uint8_t*>(data);
    }
  }
  if (data_ != nullptr) return;
  ::close(file_);
  fail(path, "the file cannot be read: {}; check the path", reason);
}

MappedFile::~MappedFile() {
  if (file_ >= 0) ::close(file_);
  if (data_ != nullptr) ::munmap(const_cast<uint8_t*>(data_), size_);
}

MappedFile::MappedFile(MappedFile&& other) noexcept
    : path_(std::move(other.path_)),
      file_(std::exchange(other.file_, -1)),
      data_(std::exchange(other.data_, nullptr)),
      size_(std::exchange(other.size_, 0)) {}

void MappedFile::read(uint64_t offset, std::span<uint8_t> to) const {
  while (!to.empty()) {
    const ssize_t count = ::pread(file_, to.data(), to.size(), static_cast<off_t>(offset));
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) {
      fail(path_, "the file must be readable to its end, but reading at byte {} failed: {}", offset,
           count == 0 ? "it has become shorter" : std::strerror(errno));
    }
    offset += static_cast<uint64_t>(count);
    to = to.subspan(static_cast<size_t>(count));
  }
}

AsideFile::AsideFile(const std::string& path) : path_(path), temporary_(path + ".tmp") {
  file_ = ::open(temporary_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  if (file_ < 0) fail_here("cannot be written");
}

AsideFile::~AsideFile() {
  if (file_ < 0) return;
  ::close(file_);
  ::unlink(temporary_.c_str());
}

void AsideFile::write(const void* data, size_t num_bytes) {
  const char* next = static_cast<const char*>(data);
  while (num_bytes > 0) {
    const ssize_t count = ::write(file_, next, num_bytes);
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) fail_here("could not be written to its end");
    next += count;
    num_bytes -= static_cast<size_t>(count);
  }
}

void AsideFile::commit() {
  if (::fsync(file_) != 0) fail_here("could not be written to its end");
  if (::rename(temporary_.c_str(), path_.c_str()) != 0) fail_here("cannot be put in place");
  ::close(std::exchange(file_, -1));
}

void AsideFile::fail_here(const char* what) {
  fail(path_, "the file {}: {}; what stood there before is untouched", what, std::strerror(errno));
}

}  // namespace octet::io

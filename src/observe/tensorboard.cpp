#include "observe/tensorboard.h"

#include <algorithm>
#include <bit>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstring>
#include <fcntl.h>
#include <filesystem>
#include <unistd.h>

#include "base/crc32c.h"
#include "base/error.h"

namespace octet::observe {
namespace {

template <class T>
void append_raw(std::string& out, T value) {
  static_assert(std::endian::native == std::endian::little);
  char bytes[sizeof(T)];
  std::memcpy(bytes, &value, sizeof(T));
  out.append(bytes, sizeof(T));
}

void append_varint(std::string& out, uint64_t value) {
  for (; value >= 0x80; value >>= 7) out += static_cast<char>((value & 0x7F) | 0x80);
  out += static_cast<char>(value);
}

// Protobuf fields: (number << 3) | wire type, then the value. All field numbers here are below 16.
void field_varint(std::string& out, int number, int64_t value) {
  out += static_cast<char>(number << 3);
  append_varint(out, static_cast<uint64_t>(value));
}
void field_double(std::string& out, int number, double value) {
  out += static_cast<char>(number << 3 | 1);
  append_raw(out, value);
}
void field_float(std::string& out, int number, float value) {
  out += static_cast<char>(number << 3 | 5);
  append_raw(out, value);
}
void field_bytes(std::string& out, int number, std::string_view value) {
  out += static_cast<char>(number << 3 | 2);
  append_varint(out, value.size());
  out += value;
}
void field_doubles(std::string& out, int number, std::span<const double> values) {
  std::string packed;
  for (const double value : values) append_raw(packed, value);
  field_bytes(out, number, packed);
}

uint32_t masked_crc(std::string_view bytes) { return std::rotr(crc32c(bytes), 15) + 0xA282EAD8u; }

std::string host_name() {
  char name[256] = "";
  if (::gethostname(name, sizeof(name) - 1) != 0 || name[0] == '\0') return "localhost";
  std::string host = name;
  std::replace(host.begin(), host.end(), '/', '_');
  return host;
}

}  // namespace

Histogram make_histogram(std::span<const float> values, int num_buckets) {
  Histogram h;
  for (const float value : values) {
    if (!std::isfinite(value)) continue;
    h.min = h.num == 0 ? value : std::min<double>(h.min, value);
    h.max = h.num == 0 ? value : std::max<double>(h.max, value);
    h.num += 1;
    h.sum += value;
    h.sum_squares += static_cast<double>(value) * value;
  }
  if (h.num == 0) return h;
  const double width = (h.max - h.min) / num_buckets;
  if (!(width > 0)) num_buckets = 1;
  for (int i = 1; i < num_buckets; ++i) h.limits.push_back(h.min + width * i);
  h.limits.push_back(h.max);
  h.counts.assign(h.limits.size(), 0);
  for (const float value : values) {
    if (!std::isfinite(value)) continue;
    const auto bucket = std::lower_bound(h.limits.begin(), h.limits.end() - 1, value);
    h.counts[static_cast<size_t>(bucket - h.limits.begin())] += 1;
  }
  return h;
}

TensorBoardWriter::TensorBoardWriter(const std::string& folder, int64_t first_step) {
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  if (error) fail(folder, "the folder cannot be made: {}", error.message());
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(now).count();
  // A second writer within the same second gets the next number.
  for (int uid = 0; file_ < 0; ++uid) {
    path_ = fmt::format("{}/events.out.tfevents.{:010}.{}.{}.{}", folder, seconds, host_name(),
                        ::getpid(), uid);
    file_ = ::open(path_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_APPEND | O_CLOEXEC, 0644);
    if (file_ < 0 && errno != EEXIST) {
      fail(path_, "the file cannot be written: {}", std::strerror(errno));
    }
  }
  std::string version;
  field_bytes(version, 3, "brain.Event:2");
  write_event(version);
  if (first_step > 0) {
    std::string session;
    field_varint(session, 1, 1);  // SessionLog.status = START
    std::string event;
    field_varint(event, 2, first_step);
    field_bytes(event, 7, session);
    write_event(event);
  }
}

TensorBoardWriter::~TensorBoardWriter() { ::close(file_); }

void TensorBoardWriter::scalars(int64_t step, const MetricList& metrics) {
  std::string summary;
  for (const auto& [tag, number] : metrics) {
    if (!std::isfinite(number)) continue;
    std::string value;
    field_bytes(value, 1, tag);
    field_float(value, 2, static_cast<float>(number));
    field_bytes(summary, 1, value);
  }
  std::string event;
  field_varint(event, 2, step);
  field_bytes(event, 5, summary);
  write_event(event);
}

void TensorBoardWriter::histogram(int64_t step, std::string_view tag, const Histogram& histogram) {
  OCTET_ASSERT(histogram.limits.size() == histogram.counts.size());
  std::string proto;
  field_double(proto, 1, histogram.min);
  field_double(proto, 2, histogram.max);
  field_double(proto, 3, histogram.num);
  field_double(proto, 4, histogram.sum);
  field_double(proto, 5, histogram.sum_squares);
  field_doubles(proto, 6, histogram.limits);
  field_doubles(proto, 7, histogram.counts);
  std::string value;
  field_bytes(value, 1, tag);
  field_bytes(value, 5, proto);
  std::string summary;
  field_bytes(summary, 1, value);
  std::string event;
  field_varint(event, 2, step);
  field_bytes(event, 5, summary);
  write_event(event);
}

void TensorBoardWriter::write_event(std::string_view fields) {
  const std::chrono::duration<double> now = std::chrono::system_clock::now().time_since_epoch();
  std::string event;
  field_double(event, 1, now.count());
  event += fields;

  std::string record;
  append_raw(record, static_cast<uint64_t>(event.size()));
  append_raw(record, masked_crc(record));
  record += event;
  append_raw(record, masked_crc(event));
  if (::write(file_, record.data(), record.size()) != static_cast<ssize_t>(record.size())) {
    fail(path_, "an event cannot be written: {}; free some space and resume the run",
         std::strerror(errno));
  }
}

}  // namespace octet::observe

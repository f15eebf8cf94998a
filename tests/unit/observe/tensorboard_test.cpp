// The writer's files, taken apart by a reader of their own.
#include "observe/tensorboard.h"

#include <cmath>
#include <cstring>
#include <filesystem>
#include <limits>
#include <map>
#include <stdexcept>
#include <unistd.h>

#include <fmt/core.h>
#include <gtest/gtest.h>

#include "base/strings.h"

namespace octet::observe {
namespace {

namespace fs = std::filesystem;

// CRC-32C bit by bit, so that the reader shares no table with the writer.
uint32_t slow_crc32c(std::string_view bytes) {
  uint32_t crc = 0xFFFFFFFFu;
  for (const char c : bytes) {
    crc ^= static_cast<uint8_t>(c);
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) != 0 ? 0x82F63B78u : 0);
  }
  return ~crc;
}

template <class T>
T raw(std::string_view bytes) {
  if (bytes.size() < sizeof(T)) throw std::runtime_error("the file is cut short");
  T value;
  std::memcpy(&value, bytes.data(), sizeof(T));
  return value;
}

std::string_view take(std::string_view& bytes, size_t count) {
  if (bytes.size() < count) throw std::runtime_error("the file is cut short");
  const std::string_view part = bytes.substr(0, count);
  bytes.remove_prefix(count);
  return part;
}

uint32_t unmask(uint32_t masked) {
  const uint32_t rotated = masked - 0xA282EAD8u;
  return rotated << 15 | rotated >> 17;
}

std::vector<std::string> records(std::string_view file) {
  std::vector<std::string> out;
  while (!file.empty()) {
    const std::string_view length = take(file, 8);
    EXPECT_EQ(unmask(raw<uint32_t>(take(file, 4))), slow_crc32c(length));
    const std::string_view data = take(file, raw<uint64_t>(length));
    EXPECT_EQ(unmask(raw<uint32_t>(take(file, 4))), slow_crc32c(data));
    out.emplace_back(data);
  }
  return out;
}

// The fields of a message: number → values, each as its raw bytes (a varint as 8 bytes).
using Message = std::multimap<int, std::string>;

uint64_t varint(std::string_view& bytes) {
  uint64_t value = 0;
  for (int shift = 0;; shift += 7) {
    const auto byte = static_cast<uint8_t>(take(bytes, 1)[0]);
    value |= static_cast<uint64_t>(byte & 0x7F) << shift;
    if (byte < 0x80) return value;
  }
}

Message parse(std::string_view bytes) {
  Message message;
  while (!bytes.empty()) {
    const uint64_t tag = varint(bytes);
    std::string value;
    switch (tag & 7) {
      case 0: {
        const uint64_t number = varint(bytes);
        value.assign(reinterpret_cast<const char*>(&number), 8);
        break;
      }
      case 1:
        value = take(bytes, 8);
        break;
      case 2:
        value = take(bytes, varint(bytes));
        break;
      case 5:
        value = take(bytes, 4);
        break;
      default:
        throw std::runtime_error("an unknown wire type");
    }
    message.emplace(static_cast<int>(tag >> 3), value);
  }
  return message;
}

std::string_view field(const Message& message, int number) {
  const auto found = message.find(number);
  if (found == message.end()) throw std::runtime_error("a field is missing");
  return found->second;
}

std::vector<double> doubles(std::string_view bytes) {
  std::vector<double> values;
  while (!bytes.empty()) values.push_back(raw<double>(take(bytes, 8)));
  return values;
}

class TensorBoard : public ::testing::Test {
 protected:
  void SetUp() override {
    folder_ = (fs::temp_directory_path() / fmt::format("octet-tb-{}", ::getpid())).string();
    fs::remove_all(folder_);
  }
  void TearDown() override { fs::remove_all(folder_); }
  std::string folder_;
};

TEST_F(TensorBoard, ScalarsAndHistogramsReadBack) {
  TensorBoardWriter writer(folder_);
  EXPECT_NE(fs::path(writer.path()).filename().string().find("events.out.tfevents."),
            std::string::npos);
  writer.scalars(7, {{"reward", 0.25}, {"kl", std::nan("")}, {"eval/reward", -3}});
  const std::vector<float> values = {-1, 0, 0, 1, 3, std::numeric_limits<float>::infinity()};
  writer.histogram(300, "ratio", make_histogram(values, 4));

  const auto events = records(read_file(writer.path()));
  ASSERT_EQ(events.size(), 3u);
  EXPECT_EQ(field(parse(events[0]), 3), "brain.Event:2");
  EXPECT_GT(raw<double>(field(parse(events[0]), 1)), 1.7e9);

  const Message scalars = parse(events[1]);
  EXPECT_EQ(raw<int64_t>(field(scalars, 2)), 7);
  const Message summary = parse(field(scalars, 5));
  ASSERT_EQ(summary.count(1), 2u);  // NaN is left out
  auto value = summary.find(1);
  EXPECT_EQ(field(parse(value->second), 1), "reward");
  EXPECT_EQ(raw<float>(field(parse(value->second), 2)), 0.25f);
  ++value;
  EXPECT_EQ(field(parse(value->second), 1), "eval/reward");
  EXPECT_EQ(raw<float>(field(parse(value->second), 2)), -3.0f);

  const Message event = parse(events[2]);
  EXPECT_EQ(raw<int64_t>(field(event, 2)), 300);
  const Message histogram = parse(field(parse(field(parse(field(event, 5)), 1)), 5));
  EXPECT_EQ(raw<double>(field(histogram, 1)), -1.0);
  EXPECT_EQ(raw<double>(field(histogram, 2)), 3.0);
  EXPECT_EQ(raw<double>(field(histogram, 3)), 5.0);
  EXPECT_EQ(raw<double>(field(histogram, 4)), 3.0);
  EXPECT_EQ(raw<double>(field(histogram, 5)), 11.0);
  EXPECT_EQ(doubles(field(histogram, 6)), (std::vector<double>{0, 1, 2, 3}));
  EXPECT_EQ(doubles(field(histogram, 7)), (std::vector<double>{3, 1, 0, 1}));
}

TEST_F(TensorBoard, AResumedRunTellsReadersToForget) {
  const TensorBoardWriter first(folder_);
  const TensorBoardWriter resumed(folder_, 21);
  EXPECT_NE(first.path(), resumed.path());
  const auto events = records(read_file(resumed.path()));
  ASSERT_EQ(events.size(), 2u);
  const Message start = parse(events[1]);
  EXPECT_EQ(raw<int64_t>(field(start, 2)), 21);
  EXPECT_EQ(raw<int64_t>(field(parse(field(start, 7)), 1)), 1);
}

TEST(HistogramOf, NothingAndEqualValues) {
  EXPECT_TRUE(make_histogram({}).limits.empty());
  const std::vector<float> nothing = {std::nanf("")};
  EXPECT_EQ(make_histogram(nothing).num, 0);
  const std::vector<float> equal = {2, 2, 2};
  const Histogram h = make_histogram(equal);
  EXPECT_EQ(h.limits, std::vector<double>{2});
  EXPECT_EQ(h.counts, std::vector<double>{3});
}

}  // namespace
}  // namespace octet::observe

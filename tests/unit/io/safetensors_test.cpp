#include "io/safetensors.h"

#include <cstring>
#include <numeric>

#include "unit/io/test_files.h"

namespace octet::io {
namespace {

using tensor::DType;
using tensor::Shape;
using tensor::TensorView;

std::string with_header(const std::string& header, size_t data_bytes) {
  const uint64_t length = header.size();
  std::string file(reinterpret_cast<const char*>(&length), sizeof(length));
  return file + header + std::string(data_bytes, '\1');
}

TEST(Safetensors, ReadsBackWhatItWrote) {
  TempFolder folder;
  std::vector<float> weights(6);
  std::iota(weights.begin(), weights.end(), 1.0f);
  int64_t step = 7;
  uint8_t codes[3] = {1, 2, 3};
  const std::string path = folder.path("a.safetensors");
  write_safetensors(path,
                    {{"w", TensorView(weights.data(), DType::kF32, {2, 3})},
                     {"columns", TensorView(weights.data() + 1, DType::kF32, {2, 2}, 3)},
                     {"codes", TensorView(codes, DType::kE4M3, {3})},
                     {"empty", TensorView(codes, DType::kU8, {0, 4})},
                     {"step", TensorView(&step, DType::kI64, {})}},
                    {{"format", "pt"}, {"note", "a \"quoted\" one"}});

  const SafetensorsFile file(path);
  EXPECT_EQ(file.names(), (std::vector<std::string>{"step", "columns", "w", "codes", "empty"}));
  EXPECT_EQ(file.metadata().at("note"), "a \"quoted\" one");
  EXPECT_EQ(file.view("step").shape, Shape{});
  EXPECT_EQ(*file.view("step").as<int64_t>(), 7);
  EXPECT_EQ(file.view("w").shape, (Shape{2, 3}));
  EXPECT_EQ(std::memcmp(file.view("w").data, weights.data(), 24), 0);
  const float columns[] = {2, 3, 5, 6};
  EXPECT_EQ(std::memcmp(file.view("columns").data, columns, sizeof(columns)), 0);
  EXPECT_EQ(file.view("codes").dtype, DType::kE4M3);
  EXPECT_EQ(file.view("empty").num_elements(), 0);
  EXPECT_FALSE(std::filesystem::exists(path + ".tmp"));
  expect_contains(error_of([&] { file.view("colums"); }), "nearest is \"columns\"");
}

// The files were written by the reference implementation: the same tensors give the same bytes.
TEST(Safetensors, WritesTheBytesOfTheReference) {
  TempFolder folder;
  for (const char* name : {"models/llama3-tiny/model.safetensors", "peft/golden.safetensors",
                           "models/qwen3-tiny/golden.safetensors", "fp8/quantise.safetensors"}) {
    const SafetensorsFile file(golden_path(name));
    std::vector<NamedTensor> tensors;
    for (const std::string& tensor : file.names()) tensors.push_back({tensor, file.view(tensor)});
    const std::string copy = folder.path("copy.safetensors");
    write_safetensors(copy, tensors, file.metadata());
    const SafetensorsFile again(copy);
    EXPECT_EQ(again.names(), file.names()) << name;
    for (const std::string& tensor : file.names()) {
      const TensorView a = file.view(tensor);
      const TensorView b = again.view(tensor);
      ASSERT_TRUE(a.dtype == b.dtype && a.shape == b.shape) << tensor;
      ASSERT_EQ(std::memcmp(a.data, b.data, static_cast<size_t>(a.num_bytes())), 0) << tensor;
    }
    if (file.metadata().size() <= 1) {  // the reference writes several in no fixed order
      EXPECT_TRUE(read_file(copy) == read_file(file.path())) << name;
    }
  }
}

TEST(Safetensors, ViewsAreAlignedEvenWhereTheFileIsNot) {
  TempFolder folder;
  const std::string header = R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},)"
                             R"("b":{"dtype":"F32","shape":[1],"data_offsets":[1,5]}})";
  std::string content = with_header(header, 5);
  const float value = 2.5f;
  std::memcpy(content.data() + content.size() - 4, &value, 4);
  const SafetensorsFile file(folder.write("a.safetensors", content));
  const TensorView view = file.view("b");
  EXPECT_EQ(reinterpret_cast<uintptr_t>(view.data) % alignof(float), 0u);
  EXPECT_EQ(*view.as<float>(), 2.5f);
  EXPECT_EQ(file.view("b").data, view.data);
}

TEST(Safetensors, RefusesWhatItCannotHoldOnlyWhenAsked) {
  TempFolder folder;
  const SafetensorsFile file(
      folder.write("a.safetensors",
                   with_header(R"({"deep":{"dtype":"U8","shape":[1,1,1,1,2],"data_offsets":[0,2]},)"
                               R"("big":{"dtype":"U64","shape":[1],"data_offsets":[2,10]},)"
                               R"("half":{"dtype":"F4","shape":[4],"data_offsets":[10,12]}}   )",
                               12)));
  expect_contains(error_of([&] { file.view("deep"); }), "\"deep\" has 5 axes");
  expect_contains(error_of([&] { file.view("big"); }), "U64");
  expect_contains(error_of([&] { file.view("half"); }), "F4");
}

struct BadFile {
  const char* header;
  size_t data_bytes;
  const char* expected;
};

class SafetensorsBadHeader : public testing::TestWithParam<BadFile> {};

TEST_P(SafetensorsBadHeader, IsNamed) {
  TempFolder folder;
  const std::string path =
      folder.write("bad.safetensors", with_header(GetParam().header, GetParam().data_bytes));
  const std::string message = error_of([&] { SafetensorsFile file(path); });
  expect_contains(message, "bad.safetensors");
  expect_contains(message, GetParam().expected);
}

INSTANTIATE_TEST_SUITE_P(
    All, SafetensorsBadHeader,
    testing::Values(
        BadFile{" {}", 0, "must start with"}, BadFile{"{", 0, "valid JSON"},
        BadFile{"{\"a\xFF\":1}", 0, "valid JSON"}, BadFile{"{}", 1, "nothing may follow"},
        BadFile{R"({"a":1})", 0, "\"a\": an object"},
        BadFile{R"({"a":{"dtype":"U8","shape":[1]}})", 1, "data_offsets is missing"},
        BadFile{R"({"a":{"dtype":"F7","shape":[1],"data_offsets":[0,1]}})", 1, "\"F7\""},
        BadFile{R"({"a":{"dtype":8,"shape":[1],"data_offsets":[0,1]}})", 1, "dtype"},
        BadFile{R"({"a":{"dtype":"U8","shape":1,"data_offsets":[0,1]}})", 1, "shape must be"},
        BadFile{R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1,2]}})", 1, "list of two"},
        BadFile{R"({"a":{"dtype":"U8","shape":[-1],"data_offsets":[0,1]}})", 1, "-1"},
        BadFile{R"({"a":{"dtype":"U8","shape":[1.5],"data_offsets":[0,1]}})", 1, "1.5"},
        BadFile{R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,281474976710656]}})", 1,
                "281474976710656"},
        BadFile{
            R"({"a":{"dtype":"U8","shape":[1099511627776,1099511627776],"data_offsets":[0,1]}})", 1,
            "larger than any file"},
        BadFile{R"({"a":{"dtype":"F32","shape":[281474976710655],"data_offsets":[0,4]}})", 4,
                "takes 1125899906842620 bytes"},
        BadFile{R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}})", 4, "takes 8 bytes"},
        BadFile{R"({"a":{"dtype":"F32","shape":[0],"data_offsets":[4,0]}})", 4, "takes 0 bytes"},
        BadFile{R"({"a":{"dtype":"F4","shape":[3],"data_offsets":[0,1]}})", 1, "F4"},
        BadFile{R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}})", 3, "cut short"},
        BadFile{R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}})", 5, "nothing may"},
        BadFile{R"({"a":{"dtype":"U8","shape":[2],"data_offsets":[2,4]}})", 4, "a hole"},
        BadFile{R"({"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},)"
                R"("b":{"dtype":"U8","shape":[2],"data_offsets":[1,3]}})",
                3,
                "\"b\": its bytes must start at 2, where those before end, but start at 1 (an "
                "overlap)"},
        BadFile{R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},)"
                R"("a":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}})",
                2, "\"a\" stands twice"},
        BadFile{R"({"__metadata__":{"format":1}})", 0, "must hold strings"},
        BadFile{R"({"__metadata__":[]})", 0, "__metadata__ must be an object"}));

TEST(Safetensors, RefusesTruncatedAndMissingFiles) {
  TempFolder folder;
  expect_contains(error_of([&] { SafetensorsFile(folder.path("none")); }), "No such file");
  expect_contains(error_of([&] { SafetensorsFile file(folder.path()); }), "regular file");
  expect_contains(error_of([&] { SafetensorsFile(folder.write("empty", "")); }), "empty");
  expect_contains(error_of([&] { SafetensorsFile(folder.write("a", "1234567")); }), "only 7");
  const std::string huge = std::string(7, '\xFF') + "\x7F{}";
  expect_contains(error_of([&] { SafetensorsFile(folder.write("a", huge)); }), "at most 100000000");
  const std::string whole = read_file(golden_path("models/qwen3-tiny/model.safetensors"));
  for (const size_t size : {size_t{8}, size_t{100}, whole.size() / 2, whole.size() - 1}) {
    const std::string path = folder.write("cut", std::string_view(whole).substr(0, size));
    expect_contains(error_of([&] { SafetensorsFile file(path); }), "cut short");
  }
}

TEST(Safetensors, KeepsTheOldFileWhenWritingFails) {
  TempFolder folder;
  const std::string path = folder.write("a.safetensors", "old");
  EXPECT_THROW(write_safetensors(path, {{"w", DType::kF32, {2}}},
                                 [](const TensorSpec&) -> TensorView { fail("test", "no data"); }),
               Error);
  EXPECT_EQ(read_file(path), "old");
  EXPECT_FALSE(std::filesystem::exists(path + ".tmp"));
  const std::vector<NamedTensor> none;
  expect_contains(error_of([&] { write_safetensors(path + "/b", none); }), "Not a directory");
  float value = 0;
  const TensorView view(&value, DType::kF32, {1});
  expect_contains(error_of([&] { write_safetensors(path, {{"w", view}, {"w", view}}); }), "\"w\"");
}

}  // namespace
}  // namespace octet::io

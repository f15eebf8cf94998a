// Recorded calls against the same calls made one by one, and downloads in two halves.
#include <algorithm>

#include "parity/cuda/cuda_test.h"

namespace octet::parity {
namespace {

using tensor::Granularity;
using tensor::TensorView;

class RecordingCuda : public CudaTest {
 protected:
  TensorView make(DType dtype, const Shape& shape) {
    buffers_.push_back(device().allocator().allocate(dtype, shape, "test"));
    return buffers_.back().view(dtype, shape);
  }
  TensorView upload(const Array& array) {
    const TensorView view = make(array.view().dtype, array.view().shape);
    device().upload(array.view().data, view);
    return view;
  }
  std::vector<uint8_t> download(const TensorView& view) {
    std::vector<uint8_t> bytes(static_cast<size_t>(view.num_bytes()));
    device().download(view, bytes.data());
    return bytes;
  }

  std::vector<tensor::Buffer> buffers_;
};

TEST_F(RecordingCuda, RepeatsTheCallsOnWhatLiesThere) {
  constexpr int64_t kRows = 72, kWidth = 128, kOut = 256, kVocab = 40;
  const TensorView table = upload(random_array(DType::kBF16, Shape{kVocab, kWidth}, 1));
  const TensorView norm = upload(random_array(DType::kBF16, Shape{kWidth}, 2));
  const TensorView weight = upload(random_array(DType::kBF16, Shape{kOut, kWidth}, 3));
  const ops::Weight dense{weight, {}};
  const ops::Weight codes{
      {}, {make(DType::kE4M3, {kOut, kWidth}), make(DType::kF32, {kOut}), Granularity::kRow}};
  device().quantize({weight, {}, codes.quantized});
  const TensorView ids = make(DType::kI32, {kRows}), x = make(DType::kBF16, {kRows, kWidth});
  const TensorView y = make(DType::kBF16, {kRows, kWidth}), z = make(DType::kBF16, {kRows, kOut});
  const TensorView w = make(DType::kBF16, {kRows, kOut});
  const tensor::QuantizedView yq{make(DType::kE4M3, {kRows, kWidth}), make(DType::kF32, {kRows}),
                                 Granularity::kRow};
  const tensor::QuantizedView xq{make(DType::kE4M3, {kRows, kWidth}), make(DType::kF32, {1}),
                                 Granularity::kTensor};
  const auto body = [&] {
    device().embedding({table, ids, x});
    device().quantize({x, {}, xq});  // through scratch
    device().rms_norm({.x = x, .weight = norm, .y = y, .quantized = {.out = yq}});
    device().linear({.x = {}, .xq = yq, .weights = {&codes, 1}, .bias = {}, .y = z});
    device().linear({.x = y, .xq = {}, .weights = {&dense, 1}, .bias = {}, .y = w});
  };
  std::unique_ptr<ops::Recording> recording;
  std::vector<TensorView> guards;
  for (int round = 0; round < 8; ++round) {
    std::vector<int32_t> values;
    for (int64_t i = 0; i < kRows; ++i) {
      values.push_back(static_cast<int32_t>((7 * i + 3 * round) % kVocab));
    }
    device().upload(values.data(), ids);
    std::vector<std::vector<uint8_t>> results[2];
    ops::QuantizeCounters counters[2];
    for (const int recorded : {0, 1}) {
      for (const TensorView& view : {x, y, z, w, yq.codes, yq.scales, xq.codes, xq.scales}) {
        device().fill_zero(view);
      }
      device().take_quantize_counters();
      recorded ? device().run_recorded(recording, body) : body();
      counters[recorded] = device().take_quantize_counters();
      for (const TensorView& view : {x, y, z, w, yq.codes, yq.scales, xq.codes, xq.scales}) {
        results[recorded].push_back(download(view));
      }
    }
    EXPECT_TRUE(recording != nullptr);
    EXPECT_TRUE(results[0] == results[1]) << "round " << round;
    EXPECT_EQ(counters[0].elements, 2 * kRows * kWidth);
    EXPECT_EQ(counters[0].elements, counters[1].elements);
    EXPECT_EQ(counters[0].saturated, counters[1].saturated);
    EXPECT_EQ(counters[0].underflowed, counters[1].underflowed);
    for (const TensorView& guard : guards) {
      const std::vector<uint8_t> bytes = download(guard);
      ASSERT_EQ(std::ranges::count(bytes, 0), std::ssize(bytes)) << "round " << round;
    }
    if (round == 4) {  // scratch moves, and what it left is somebody else's
      device().squared_norm(make(DType::kF32, {int64_t{1} << 22}));
      for (int i = 0; i < 64; ++i) guards.push_back(make(DType::kU8, {int64_t{256} << (i % 8)}));
    }
  }
}

// What cannot be recorded is run all the same, each time.
TEST_F(RecordingCuda, RunsWhatCannotBeRecorded) {
  const TensorView x = make(DType::kF32, {64}), y = make(DType::kF32, {64});
  std::unique_ptr<ops::Recording> recording;
  for (int round = 0; round < 4; ++round) {
    device().run_recorded(recording, [&] {
      const std::vector<float> values(64, static_cast<float>(round + 1));
      device().upload(values.data(), x);
      device().add({x, x, y});
    });
    std::vector<float> given(64);
    device().download(y, given.data());
    EXPECT_EQ(given, std::vector<float>(64, static_cast<float>(2 * (round + 1))));
  }
  // An error is an error, and the device goes on.
  std::unique_ptr<ops::Recording> wrong;
  const auto fails = [&] { device().add({x, y.slice_rows(0, 3), y}); };
  EXPECT_THROW(device().run_recorded(wrong, fails), Error);
  device().run_recorded(wrong, [&] { device().add({x, x, y}); });
  EXPECT_THROW(device().run_recorded(wrong, fails), Error);
  device().run_recorded(recording, [&] { device().add({x, x, y}); });
  device().synchronize();
}

TEST_F(RecordingCuda, DownloadsInTwoHalves) {
  const TensorView x = make(DType::kF32, {1000});
  std::vector<int64_t> tickets;
  for (int i = 0; i < ops::Backend::kMaxDownloads + 2; ++i) {
    const std::vector<float> values(1000, static_cast<float>(i));
    device().upload(values.data(), x);
    tickets.push_back(device().begin_download(x.slice_rows(0, i % 2 == 0 ? 1000 : 10)));
  }
  for (int i = 2; i < ops::Backend::kMaxDownloads + 2; ++i) {
    std::vector<float> given(1000, -1.0f);
    device().end_download(tickets[static_cast<size_t>(i)], given.data());
    const int64_t count = i % 2 == 0 ? 1000 : 10;
    EXPECT_EQ(std::ranges::count(given, static_cast<float>(i)), count) << i;
    EXPECT_EQ(std::ranges::count(given, -1.0f), 1000 - count) << i;
  }
}

}  // namespace
}  // namespace octet::parity

// Who serves a product changes no byte: whatever is chosen for whatever number of tokens, grouped
// or not, recorded or not. And the file of choices.
#include <cmath>
#include <cstdlib>
#include <cuda_runtime_api.h>
#include <filesystem>
#include <functional>

#include "backend/cuda/cublaslt.h"
#include "backend/cuda/ops.h"
#include "backend/cuda/product_trial_kernels.h"
#include "base/strings.h"
#include "parity/cuda/cuda_test.h"

namespace octet::parity {
namespace {

namespace fs = std::filesystem;
using cuda::ProductFormat;
using tensor::Buffer;
using tensor::Granularity;
using tensor::TensorView;

constexpr ProductFormat kFormats[] = {ProductFormat::kBF16, ProductFormat::kScaled,
                                      ProductFormat::kBlocks};
constexpr int64_t kMaxTokens = 1100;

// A folder for the choices of one test.
class CacheFolder {
 public:
  explicit CacheFolder(const std::string& name)
      : path_((fs::temp_directory_path() / ("octet-" + name)).string()) {
    fs::remove_all(path_);
    setenv("OCTET_CACHE", path_.c_str(), 1);
  }
  ~CacheFolder() {
    unsetenv("OCTET_CACHE");
    fs::remove_all(path_);
  }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

// Operands on the device, the weights of a group side by side.
class Operands {
 public:
  Operands(cuda::Context& context, ProductFormat format, std::vector<int64_t> parts, int64_t depth,
           bool biased = false)
      : context_(context), format_(format), parts_(std::move(parts)), depth_(depth) {
    for (const int64_t rows : parts_) rows_ += rows;
    const int64_t chunks = (depth + 127) / 128;
    const int64_t each = format == ProductFormat::kBF16 ? 2 : 1;
    weights_ = allocate(rows_ * depth_ * each);
    x_ = allocate(kMaxTokens * depth_ * each);
    y_ = allocate(kMaxTokens * rows_ * 4);
    w_scales_ = allocate(4 * rows_ * chunks);
    x_scales_ = allocate(4 * kMaxTokens * chunks);
    if (each == 2) {
      cuda::fill_bf16(context, static_cast<uint16_t*>(weights_.data()), rows_ * depth_, 11);
      cuda::fill_bf16(context, static_cast<uint16_t*>(x_.data()), kMaxTokens * depth_, 12);
    } else {
      cuda::fill_codes(context, static_cast<uint8_t*>(weights_.data()), rows_ * depth_, 11);
      cuda::fill_codes(context, static_cast<uint8_t*>(x_.data()), kMaxTokens * depth_, 12);
    }
    if (biased) {
      bias_ = allocate(rows_ * 2);
      cuda::fill_bf16(context, static_cast<uint16_t*>(bias_.data()), rows_, 15);
    }
    cuda::fill_scales(context, static_cast<float*>(w_scales_.data()), rows_ * chunks, 13);
    cuda::fill_scales(context, static_cast<float*>(x_scales_.data()), kMaxTokens * chunks, 14);
  }

  // The digests of y's rows.
  std::vector<uint64_t> linear(int64_t tokens) {
    context_.fill_zero(y_.data(), kMaxTokens * rows_ * 2);
    queue(tokens);
    return digests(tokens);
  }
  void queue(int64_t tokens) {
    const bool dense = format_ == ProductFormat::kBF16, blocks = format_ == ProductFormat::kBlocks;
    const DType dtype = dense ? DType::kBF16 : DType::kE4M3;
    const Granularity granularity = blocks ? Granularity::kBlock : Granularity::kRow;
    const Granularity per_token = blocks ? Granularity::kRowBlock : Granularity::kRow;
    std::vector<ops::Weight> weights;
    int64_t row = 0, scale = 0;
    for (const int64_t rows : parts_) {
      const Shape scales = tensor::scale_shape(granularity, rows, depth_);
      const TensorView elements(
          static_cast<char*>(weights_.data()) + row * depth_ * tensor::dtype_bytes(dtype), dtype,
          {rows, depth_});
      ops::Weight& weight = weights.emplace_back();
      if (dense) {
        weight.dense = elements;
      } else {
        weight.quantized = {elements,
                            {static_cast<float*>(w_scales_.data()) + scale, DType::kF32, scales},
                            granularity};
      }
      row += rows;
      scale += scales.num_elements();
    }
    const TensorView x(x_.data(), dtype, {tokens, depth_});
    ops::LinearArgs args;
    args.weights = weights;
    args.y = TensorView(y_.data(), DType::kBF16, {tokens, rows_});
    if (!bias_.empty()) args.bias = bias_.view(DType::kBF16, {rows_});
    if (dense) {
      args.x = x;
    } else {
      args.xq = {x,
                 {x_scales_.data(), DType::kF32, tensor::scale_shape(per_token, tokens, depth_)},
                 per_token};
    }
    cuda::linear(context_, args);
  }
  std::vector<uint64_t> digests(int64_t tokens, int64_t element_bytes = 2) {
    const int64_t row_bytes = element_bytes * rows_;
    return cuda::digest_rows(context_, y_.data(), tokens, row_bytes, row_bytes);
  }
  void fill_result() {
    cuda::fill_bf16(context_, static_cast<uint16_t*>(y_.data()), kMaxTokens * rows_ * 2, 16);
  }
  void clear() { context_.fill_zero(y_.data(), kMaxTokens * rows_ * 2); }

  // The same rows from the own kernel alone.
  std::vector<uint64_t> own(int64_t tokens) {
    cuda::run_own_product(context_, product(tokens));
    return digests(tokens);
  }
  cuda::Product product(int64_t tokens) {
    const bool blocks = format_ == ProductFormat::kBlocks;
    cuda::Product product;
    product.format = format_;
    product.num_weights = 1;
    product.weights[0] = {.data = weights_.data(),
                          .stride = depth_,
                          .rows = rows_,
                          .scales = static_cast<float*>(w_scales_.data()),
                          .scale_stride = blocks ? (depth_ + 127) / 128 : 1,
                          .row_block = blocks ? 128 : 1};
    product.x = x_.data();
    product.x_stride = depth_;
    product.x_scales = static_cast<float*>(x_scales_.data());
    product.x_scale_stride = blocks ? (depth_ + 127) / 128 : 1;
    product.num_tokens = tokens;
    product.depth = depth_;
    product.y = y_.data();
    product.y_stride = rows_;
    product.bias = bias_.data();
    product.bias_is_bf16 = true;
    return product;
  }

 private:
  Buffer allocate(int64_t bytes) { return context_.allocator().allocate(bytes, "test"); }

  cuda::Context& context_;
  ProductFormat format_;
  std::vector<int64_t> parts_;  // rows of each weight
  int64_t depth_, rows_ = 0;
  Buffer weights_, x_, y_, w_scales_, x_scales_, bias_;
};

class ProductCuda : public CudaTest {};

TEST_F(ProductCuda, WhoeverServesGivesTheOwnKernelsRows) {
  const CacheFolder folder("products");
  // The second time choices come from the file.
  for (int round = 0; round < 2; ++round) {
    cuda::Context context(0, 0);
    for (const bool biased : {false, true}) {
      for (const ProductFormat format : kFormats) {
        Operands operands(context, format, {1024, 256, 256}, 1024, biased);
        const std::vector<uint64_t> expected = operands.own(kMaxTokens);
        for (const int64_t tokens : {1,  2,   7,   8,   9,   16,  17,  24,  31,   33,   64,  65,
                                     72, 128, 200, 256, 511, 512, 520, 525, 1000, 1024, 1100}) {
          const std::vector<uint64_t> rows = operands.linear(tokens);
          for (size_t i = 0; i < rows.size(); ++i) {
            ASSERT_EQ(rows[i], expected[i])
                << "format " << static_cast<int>(format) << ", row " << i << " of " << tokens
                << ", biased " << biased << ", round " << round;
          }
        }
      }
    }
    if (context.library().description().starts_with("no ")) GTEST_SKIP() << "no cuBLASLt";
    EXPECT_NE(context.library().choices().find("\"rows\":1536"), std::string::npos);
  }
}

// Few outputs of many inputs are summed in segments, by one block or a cluster of them; few inputs
// give the own kernel's rows.
TEST_F(ProductCuda, AdaptersRowsDependOnNoOtherToken) {
  cuda::Context context(0, 0), portable(0, 0);
  portable.force_portable();
  constexpr int64_t kTokens[] = {1, 2, 7, 16, 17, 31, 64, 65, 130, 1024, 1025, kMaxTokens};
  for (const int64_t depth : {8, 16, 24, 40, 64, 128, 1024, 1032, 4096, 12288}) {
    const bool segmented = depth >= 1024;
    for (const std::vector<int64_t>& parts :
         segmented ? std::vector<std::vector<int64_t>>{{32, 32, 32}, {8}, {128, 6}}
                   : std::vector<std::vector<int64_t>>{{512, 128, 128}, {40}}) {
      Operands own(context, ProductFormat::kBF16, parts, depth);
      Operands other(portable, ProductFormat::kBF16, parts, depth);
      const std::vector<uint64_t> expected =
          segmented ? own.linear(kMaxTokens) : own.own(kMaxTokens);
      EXPECT_NE(expected[0], 0u);
      for (const int64_t tokens : kTokens) {
        for (Operands* operands : {&own, &other}) {
          const std::vector<uint64_t> rows = operands->linear(tokens);
          EXPECT_TRUE(std::equal(rows.begin(), rows.end(), expected.begin()))
              << "K=" << depth << " N=" << parts[0] << " T=" << tokens
              << (operands == &own ? "" : " portable");
        }
      }
    }
  }
}

// The own kernel's tiles differ by the numbers of tokens and rows.
TEST_F(ProductCuda, EveryTileOfTheOwnKernelGivesTheSameRows) {
  cuda::Context context(0, 0);
  for (const ProductFormat format : kFormats) {
    for (const int64_t rows : {40, 1000, 5000, 7000}) {
      for (const int64_t depth : {128, 656, 2048}) {
        Operands operands(context, format, {rows}, depth);
        const std::vector<uint64_t> expected = operands.own(300);
        for (const int64_t tokens : {1, 5, 8, 12, 16, 20, 32, 50, 64, 130}) {
          const std::vector<uint64_t> got = operands.own(tokens);
          EXPECT_TRUE(std::equal(got.begin(), got.end(), expected.begin()))
              << "format " << static_cast<int>(format) << " N=" << rows << " K=" << depth
              << " T=" << tokens;
        }
      }
    }
  }
}

// The kernel of one weight's codes, and that of several weights, of which all but one are empty.
TEST_F(ProductCuda, BothOwnKernelsOfCodesGiveTheSameRows) {
  using Change = std::function<void(cuda::Product&)>;
  const std::pair<const char*, Change> changes[] = {
      {"plain", [](cuda::Product& p) { p.bias = nullptr; }},
      {"biased", [](cuda::Product& p) { p.alpha = 0.37f; }},
      {"F32", [](cuda::Product& p) { p.y_is_bf16 = false; }},
      {"added", [](cuda::Product& p) { p.accumulate = true; }},
      {"settled", [](cuda::Product& p) { p.bias = nullptr, p.settled = true; }},
      {"not a number", [](cuda::Product& p) { p.bias = nullptr, p.alpha = std::nanf(""); }},
      {"E5M2", [](cuda::Product& p) { p.x_is_e5m2 = true; }},
      {"one scale", [](cuda::Product& p) {
         p.bias = nullptr;
         if (p.format == ProductFormat::kScaled) p.weights[0].scale_stride = p.x_scale_stride = 0;
       }}};
  cuda::Context context(0, 0);
  for (const ProductFormat format : {ProductFormat::kScaled, ProductFormat::kBlocks}) {
    for (const int64_t rows : {40, 1030, 5000, 7000}) {
      for (const int64_t depth : {128, 656, 1536}) {
        Operands operands(context, format, {rows}, depth, true);
        for (const auto& [name, change] : changes) {
          for (const int64_t tokens : {1, 7, 16, 33, 64, 65, 96, 129, 192, 256, 300, 512, 1000}) {
            cuda::Product product = operands.product(tokens);
            change(product);
            const int64_t each = product.y_is_bf16 ? 2 : 4;
            operands.fill_result();
            for (int64_t t = 0; t < tokens; t += 64) {
              cuda::Product part = product;
              part.num_weights = 2;
              part.num_tokens = std::min<int64_t>(64, tokens - t);
              part.x = static_cast<const char*>(product.x) + t * product.x_stride;
              part.x_scales = product.x_scales + t * product.x_scale_stride;
              part.y = static_cast<char*>(product.y) + t * product.y_stride * each;
              cuda::run_own_product(context, part);
            }
            const std::vector<uint64_t> expected = operands.digests(tokens + 8, each);
            operands.fill_result();
            cuda::run_own_product(context, product);
            ASSERT_EQ(operands.digests(tokens + 8, each), expected)
                << name << ", format " << static_cast<int>(format) << " N=" << rows
                << " K=" << depth << " T=" << tokens;
          }
        }
      }
    }
  }
}

TEST_F(ProductCuda, NothingIsSearchedWhileTheStreamIsCaptured) {
  const CacheFolder folder("captured");
  cuda::Context context(0, 0);
  for (const ProductFormat format : kFormats) {
    Operands operands(context, format, {1024, 256, 256}, 1024);
    const std::vector<uint64_t> expected = operands.own(kMaxTokens);
    for (const bool known : {false, true}) {
      const int64_t tokens = 40;
      if (known) operands.queue(tokens);
      operands.clear();
      context.synchronize();
      cudaGraph_t graph = nullptr;
      cudaGraphExec_t executable = nullptr;
      ASSERT_EQ(cudaStreamBeginCapture(context.stream(), cudaStreamCaptureModeThreadLocal),
                cudaSuccess);
      operands.queue(tokens);
      ASSERT_EQ(cudaStreamEndCapture(context.stream(), &graph), cudaSuccess);
      ASSERT_EQ(cudaGraphInstantiate(&executable, graph, 0), cudaSuccess);
      ASSERT_EQ(cudaGraphLaunch(executable, context.stream()), cudaSuccess);
      const std::vector<uint64_t> rows = operands.digests(tokens);
      EXPECT_TRUE(std::equal(rows.begin(), rows.end(), expected.begin()))
          << "format " << static_cast<int>(format) << " known " << known;
      cudaGraphExecDestroy(executable);
      cudaGraphDestroy(graph);
    }
  }
}

TEST_F(ProductCuda, TheLibrarysWorkspaceIsPlannedWhereItMayServe) {
  cuda::Context context(0, 0);
  if (context.library().description().starts_with("no ")) GTEST_SKIP() << "no cuBLASLt";
  ops::WorkspaceShape shape;
  shape.max_tokens = 512;
  shape.linears = {{512, 256}};
  shape.head = {1000, 256};
  shape.head_rows = 512;
  EXPECT_EQ(context.library().workspace_bytes(shape), 0);
  shape.training = true;  // 1,000 x 512 tokens are small, too
  EXPECT_EQ(context.library().workspace_bytes(shape), 0);
  shape.max_tokens = 4096;
  EXPECT_GT(context.library().workspace_bytes(shape), 0);
  shape.training = false;
  shape.linears.push_back({2048, 512});
  EXPECT_GT(context.library().workspace_bytes(shape), 0);
}

TEST_F(ProductCuda, PreparingLeavesNothingToSearchAndNoMemory) {
  const CacheFolder folder("prepared");
  cuda::Context context(0, 0);
  cuda::LibraryProducts& library = context.library();
  if (library.description().starts_with("no ")) GTEST_SKIP() << "no cuBLASLt";
  library.set_search_seconds(0.01);
  const ops::WorkspaceShape shape{.max_tokens = 40,
                                  .linears = {{1536, 1024}, {1024, 2048}},
                                  .head = {4096, 1024},
                                  .head_rows = 8,
                                  .fp8 = true};
  const cuda::Arena& memory = context.allocator();
  const int64_t before = memory.bytes_in_use(), search = library.search_bytes(context, shape);
  // The weights' copies are more than the second-level cache holds.
  EXPECT_GT(search, int64_t{160} << 20);
  library.prepare(context, shape);
  EXPECT_EQ(library.search_bytes(context, shape), 0);
  constexpr int64_t kSmall = 8 << 20;  // pages of small buffers
  EXPECT_LE(memory.peak_bytes() - before, search + library.workspace_bytes(shape) + kSmall);
  context.drop_scratch();
  EXPECT_LE(memory.bytes_in_use() - before, kSmall);
}

TEST(ProductChoices, AreKeptByDeviceAndLibrary) {
  const CacheFolder folder("choices");
  const cuda::ProductKey key{ProductFormat::kScaled, true, 6144, 4096, 64};
  cuda::ProductChoice choice;
  choice.library = true;
  choice.algorithm = {1, 2, 3, 4, 5, 6, 7, ~uint64_t{0}};
  choice.description = "a kernel";
  choice.microseconds = 8.8;
  cuda::ProductChoices("Some GPU", "1.2.3").add(key, choice);
  const cuda::ProductChoices again("Some GPU", "1.2.3");
  ASSERT_NE(again.find(key), nullptr);
  EXPECT_TRUE(again.find(key)->library);
  EXPECT_EQ(again.find(key)->algorithm, choice.algorithm);
  EXPECT_EQ(again.find({ProductFormat::kBlocks, true, 6144, 4096, 64}), nullptr);
  EXPECT_EQ(cuda::ProductChoices("Some GPU", "1.2.4").find(key), nullptr);
  EXPECT_NE(cuda::describe_product_choices().find("scaled 6144 x 4096, 33-64 tokens: 8.8 us"),
            std::string::npos);
}

// What comes with the program knows the products of Qwen3's 1.7B, 8B, 14B and 32B and of
// Llama-3-8B, so that these start without a search.
TEST(ProductChoices, ComeWithTheProgram) {
  struct Shape {
    int64_t hidden, inner, queries, kv, vocab;
  };
  const CacheFolder folder("shipped");
  const cuda::ProductChoices choices("NVIDIA H200", "13.1.0");
  for (const Shape& s : {Shape{2048, 6144, 2048, 1024, 151936},
                         {4096, 12288, 4096, 1024, 151936},
                         {5120, 17408, 5120, 1024, 151936},
                         {5120, 25600, 8192, 1024, 151936},
                         {4096, 14336, 4096, 1024, 128256}}) {
    for (const int64_t tokens : {1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192}) {
      const std::pair<int64_t, int64_t> linears[] = {{s.queries + 2 * s.kv, s.hidden},
                                                     {s.hidden, s.queries},
                                                     {2 * s.inner, s.hidden},
                                                     {s.hidden, s.inner}};
      for (const auto& [rows, depth] : linears) {
        const auto knows = [&, rows = rows, depth = depth](ProductFormat format) {
          return choices.find({format, true, rows, depth, tokens}) != nullptr;
        };
        EXPECT_TRUE(knows(ProductFormat::kBF16)) << rows << " x " << depth << ", " << tokens;
        EXPECT_TRUE(knows(ProductFormat::kScaled)) << rows << " x " << depth << ", " << tokens;
        // The library takes blocks eight tokens at a time.
        EXPECT_EQ(knows(ProductFormat::kBlocks), tokens > 1) << rows << " x " << depth;
      }
      if (tokens > 512) continue;
      EXPECT_NE(choices.find({ProductFormat::kBF16, false, s.vocab, s.hidden, tokens}), nullptr);
    }
  }
  const std::string text = cuda::describe_product_choices();
  EXPECT_NE(text.find("none searched yet in"), std::string::npos) << text;
  EXPECT_NE(text.find("come with the program, in"), std::string::npos) << text;
}

TEST(ProductChoices, AFileThatCannotBeReadIsPassedOver) {
  const CacheFolder folder("broken");
  const cuda::ProductKey key{ProductFormat::kBF16, false, 64, 64, 1};
  cuda::ProductChoices choices("GPU", "1.2.3");
  choices.add(key, {});
  for (const std::string content : {"", "{", "[]", "{\"revision\": 1}", "\xff"}) {
    write_file_atomically(choices.path(), content);
    EXPECT_EQ(cuda::ProductChoices("GPU", "1.2.3").find(key), nullptr) << content;
  }
  choices.add(key, {});
  std::string text = read_file(choices.path());
  text.replace(text.find("GPU"), 3, "TPU");
  write_file_atomically(choices.path(), text);
  EXPECT_EQ(cuda::ProductChoices("GPU", "1.2.3").find(key), nullptr) << "another device's";
}

TEST(ProductChoices, BucketsHoldEveryNumberOfTokens) {
  int64_t last = 0;
  for (int64_t tokens = 1; tokens <= 5000; ++tokens) {
    const int64_t bucket = cuda::token_bucket(tokens);
    EXPECT_LE(cuda::bucket_begin(bucket), tokens);
    EXPECT_LE(tokens, bucket);
    EXPECT_LE(last, bucket);
    if (bucket != last) {
      EXPECT_EQ(cuda::bucket_begin(bucket), tokens);
    }
    last = bucket;
  }
}

}  // namespace
}  // namespace octet::parity

#include "backend/cuda/product_trial.h"

#include <algorithm>

#include "backend/cuda/checks.h"
#include "backend/cuda/product_trial_kernels.h"
#include "backend/cuda/recording.h"
#include "backend/cuda/status.h"
#include "base/error.h"

namespace octet::cuda {
namespace {

constexpr int64_t kCacheBytes = 160 << 20;  // more than three times the second-level cache
constexpr int64_t kTestTokens = 384;

// Bytes of the larger operands of a search.
struct TrialSizes {
  explicit TrialSizes(const ProductKey& key) {
    const int64_t each = key.format == ProductFormat::kBF16 ? 2 : 1;
    weight = key.rows * key.depth * each;
    copies = divide_up(kCacheBytes, weight);
    tokens = std::max(key.tokens, kTestTokens);
    x = tokens * key.depth * each;
    y = tokens * key.rows * (key.y_is_bf16 ? 2 : 4);
  }
  int64_t weight, copies, tokens, x, y;
};

}  // namespace

ProductTrial::Event ProductTrial::make_event() {
  cudaEvent_t event = nullptr;
  check(cudaEventCreate(&event), "search for products");
  return Event(event);
}

ProductTrial::ProductTrial(Context& context, const ProductKey& key) : context_(context), key_(key) {
  const TrialSizes sizes(key);
  weight_bytes_ = sizes.weight;
  copies_ = sizes.copies;
  num_tokens_ = sizes.tokens;
  weights_ = allocate(copies_ * weight_bytes_);
  x_ = allocate(sizes.x);
  y_ = allocate(sizes.y);
  if (key.format == ProductFormat::kBF16) {
    fill_bf16(context, static_cast<uint16_t*>(weights_.data()), copies_ * weight_bytes_ / 2, 1);
    fill_bf16(context, static_cast<uint16_t*>(x_.data()), num_tokens_ * key.depth, 2);
    return;
  }
  const int64_t chunks = key.format == ProductFormat::kBlocks ? key.depth / 128 : 1;
  w_scales_ = allocate(4 * key.rows * chunks);
  x_scales_ = allocate(4 * num_tokens_ * chunks);
  fill_codes(context, static_cast<uint8_t*>(weights_.data()), copies_ * weight_bytes_, 1);
  fill_codes(context, static_cast<uint8_t*>(x_.data()), num_tokens_ * key.depth, 2);
  fill_scales(context, static_cast<float*>(w_scales_.data()), key.rows * chunks, 3);
  fill_scales(context, static_cast<float*>(x_scales_.data()), num_tokens_ * chunks, 4);
}

Product ProductTrial::product(int64_t num_tokens) {
  const bool blocks = key_.format == ProductFormat::kBlocks;
  Product product;
  product.format = key_.format;
  product.num_weights = 1;
  ProductWeight& weight = product.weights[0];
  weight.data = static_cast<char*>(weights_.data()) + next_copy_++ % copies_ * weight_bytes_;
  weight.stride = key_.depth;
  weight.rows = key_.rows;
  weight.scales = static_cast<float*>(w_scales_.data());
  weight.scale_stride = blocks ? key_.depth / 128 : 1;
  weight.row_block = blocks ? 128 : 1;
  product.x = x_.data();
  product.x_stride = key_.depth;
  product.x_scales = static_cast<float*>(x_scales_.data());
  product.x_scale_stride = blocks ? key_.depth / 128 : 1;
  product.num_tokens = num_tokens;
  product.depth = key_.depth;
  product.y = y_.data();
  product.y_is_bf16 = key_.y_is_bf16;
  product.y_stride = key_.rows;
  product.settled = true;
  return product;
}

double ProductTrial::microseconds(int runs, bool recorded, const std::function<void()>& body) {
  const cudaStream_t stream = context_.stream();
  const auto time = [&](bool with_products) {
    const auto chain = [&] {
      for (int i = 0; i < runs; ++i) {
        run_small_kernel(context_);
        if (with_products) body();
      }
    };
    std::string why_not;
    const Graph graph = recorded ? record_graph(context_, chain, why_not) : nullptr;
    if (recorded && graph == nullptr) fail("search for products", "no graph: {}", why_not);
    // Long enough that the device finds all runs queued.
    pause_stream(context_, 6000 + 8000 * runs);
    check(cudaEventRecord(begin_.get(), stream), "search for products");
    if (recorded) {
      check(cudaGraphLaunch(graph.get(), stream), "search for products");
    } else {
      chain();
    }
    check(cudaEventRecord(end_.get(), stream), "search for products");
    check(cudaEventSynchronize(end_.get()), "search for products");
    float milliseconds = 0;
    check(cudaEventElapsedTime(&milliseconds, begin_.get(), end_.get()), "search for products");
    return 1e3 * milliseconds / runs;
  };
  double& small = small_kernel_microseconds_[{runs, recorded}];
  if (small == 0) small = time(false);
  return std::max(0.1, time(true) - small);
}

const std::vector<uint64_t>& ProductTrial::expected(int64_t num_tokens) {
  std::vector<uint64_t>& found = expected_[num_tokens];
  if (found.empty()) {
    next_copy_ = 0;
    run_own_product(context_, product(num_tokens));
    found = digests(num_tokens);
  }
  return found;
}

void ProductTrial::prepare_test(int64_t num_tokens) {
  context_.fill_zero(y_.data(), num_tokens * key_.rows * (key_.y_is_bf16 ? 2 : 4));
  next_copy_ = 0;
}

std::vector<uint64_t> ProductTrial::digests(int64_t num_tokens) {
  const int64_t row_bytes = key_.rows * (key_.y_is_bf16 ? 2 : 4);
  return digest_rows(context_, y_.data(), num_tokens, row_bytes, row_bytes);
}

int64_t trial_bytes(const Context& context, const ProductKey& key) {
  const TrialSizes sizes(key);
  const Arena& pages = context.allocator();
  return pages.whole_pages(sizes.copies * sizes.weight) + pages.whole_pages(sizes.x) +
         pages.whole_pages(sizes.y);
}

}  // namespace octet::cuda

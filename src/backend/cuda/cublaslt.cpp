#include "backend/cuda/cublaslt.h"

#include <algorithm>
#include <cstring>

#include <fmt/format.h>

#include "backend/cuda/checks.h"
#include "backend/cuda/product_trial.h"
#include "backend/cuda/status.h"
#include "base/error.h"
#include "base/log.h"

namespace octet::cuda {
namespace {

// Smaller weights are not worth a search.
constexpr int64_t kSmallestWeight = 1 << 20;
// The library wants numbers of tokens of this multiple with block scales: the own kernel serves the
// rest of many tokens, or all of few.
constexpr int64_t kBlockTokens = 8;
constexpr int64_t kManyTokens = 512;

Product first_tokens(const Product& product, int64_t count) {
  Product part = product;
  part.num_tokens = count;
  return part;
}

Product last_tokens(const Product& product, int64_t count) {
  const int64_t first = product.num_tokens - count;
  const int64_t x_bytes = product.format == ProductFormat::kBF16 ? 2 : 1;
  Product part = product;
  part.num_tokens = count;
  part.x = static_cast<const char*>(product.x) + first * product.x_stride * x_bytes;
  if (product.x_scales != nullptr) part.x_scales += first * product.x_scale_stride;
  part.y = static_cast<char*>(product.y) + first * product.y_stride * (product.y_is_bf16 ? 2 : 4);
  return part;
}

// Weight `index` of a group by itself.
Product single(const Product& product, int index, int64_t first_column) {
  Product part = product;
  part.weights[0] = product.weights[index];
  part.num_weights = 1;
  part.x = static_cast<const char*>(product.x) +
           part.weights[0].x_offset * (product.format == ProductFormat::kBF16 ? 2 : 1);
  part.weights[0].x_offset = 0;
  part.y = static_cast<char*>(product.y) + first_column * (product.y_is_bf16 ? 2 : 4);
  if (product.bias != nullptr) {
    part.bias =
        static_cast<const char*>(product.bias) + first_column * (product.bias_is_bf16 ? 2 : 4);
  }
  return part;
}

}  // namespace

struct LibraryProducts::Plan {
  bool library = false;
  cublasLtMatmulAlgo_t algorithm{};
  std::unique_ptr<LibraryCall> call;
};

LibraryProducts::LibraryProducts(bool load) {
  if (load) library_ = std::make_unique<CublasLt>();
  if (library_ != nullptr && library_->loaded()) {
    description_ = fmt::format("cuBLASLt {}", library_->version());
    return;
  }
  description_ = fmt::format("no cuBLASLt ({}): own kernels serve every product",
                             load ? library_->version() : "it was not asked for");
  library_.reset();
}

LibraryProducts::~LibraryProducts() = default;

int64_t LibraryProducts::workspace_bytes(const ops::WorkspaceShape& shape) const {
  bool any = false;
  const auto look = [&](const ops::LinearShape& linear, int64_t tokens) {
    any |= linear.rows * linear.columns >= kSmallestWeight;
    // Gradients of weights contract over the tokens.
    const int64_t longest = std::max(linear.rows, linear.columns);
    any |= shape.training && longest * tokens >= kSmallestWeight;
  };
  for (const ops::LinearShape& linear : shape.linears) look(linear, shape.max_tokens);
  look(shape.head, shape.head_rows);
  return library_ != nullptr && any ? LibraryCall::kWorkspaceBytes : 0;
}

std::vector<ProductKey> LibraryProducts::unknown(Context& context,
                                                 const ops::WorkspaceShape& shape) {
  std::vector<ProductKey> found;
  const auto look = [&](ProductFormat format, const ops::LinearShape& linear, int64_t max_tokens,
                        bool y_is_bf16) {
    if (library_ == nullptr || linear.rows * linear.columns < kSmallestWeight) return;
    const int64_t fewest = format == ProductFormat::kBlocks ? kBlockTokens : 1;
    for (int64_t tokens = token_bucket(fewest); tokens <= token_bucket(max_tokens);
         tokens = token_bucket(tokens + 1)) {
      const ProductKey key{format, y_is_bf16, linear.rows, linear.columns, tokens};
      if (file(context).find(key) == nullptr) found.push_back(key);
    }
  };
  const ProductFormat format = !shape.fp8           ? ProductFormat::kBF16
                               : shape.block_scales ? ProductFormat::kBlocks
                                                    : ProductFormat::kScaled;
  for (const ops::LinearShape& linear : shape.linears) {
    look(format, linear, shape.max_tokens, true);
  }
  look(ProductFormat::kBF16, shape.head, shape.head_rows, false);
  return found;
}

int64_t LibraryProducts::search_bytes(Context& context, const ops::WorkspaceShape& shape) {
  int64_t most = 0;
  for (const ProductKey& key : unknown(context, shape)) {
    most = std::max(most, trial_bytes(context, key));
  }
  return most;
}

void LibraryProducts::prepare(Context& context, const ops::WorkspaceShape& shape) {
  if (options_.inexact) return;
  const std::vector<ProductKey> keys = unknown(context, shape);
  if (keys.empty()) return;
  log_info("searching kernels for {} products, once for this device: {}", keys.size(),
           file(context).path());
  for (const ProductKey& key : keys) try_search(context, key);
}

ProductChoices& LibraryProducts::file(Context& context) {
  if (file_ == nullptr) {
    cudaDeviceProp properties{};
    check(cudaGetDeviceProperties(&properties, context.device()), "CUDA device");
    file_ = std::make_unique<ProductChoices>(properties.name, library_->version());
  }
  return *file_;
}

std::string LibraryProducts::choices() const { return file_ == nullptr ? "" : file_->to_text(); }

bool LibraryProducts::can_serve(const Product& product) const {
  const ProductWeight& weight = product.weights[0];
  if (library_ == nullptr || product.alpha != 1 || product.accumulate || product.x_is_e5m2 ||
      (product.bias != nullptr && product.bias_is_bf16 != product.y_is_bf16) ||
      weight.x_offset != 0 || weight.rows % 16 != 0 || product.depth % 16 != 0 ||
      product.y_stride % 8 != 0 || weight.rows * product.depth < kSmallestWeight) {
    return false;
  }
  switch (product.format) {
    case ProductFormat::kBF16:
      return true;
    case ProductFormat::kScaled:  // a scale and a bias may be fused into one rounding there
      return product.bias == nullptr && weight.scale_stride == 1 && product.x_scale_stride == 1;
    case ProductFormat::kBlocks:
      // Rows of scales must have a length that is a multiple of four.
      return product.depth % 512 == 0 && weight.row_block == 128 && weight.chunk_stride == 1 &&
             weight.scale_stride == product.depth / 128 &&
             product.x_scale_stride == product.depth / 128 &&
             (product.num_tokens % kBlockTokens == 0 || product.num_tokens >= kManyTokens);
  }
  return false;
}

ProductChoice LibraryProducts::search(Context& context, const ProductKey& key) {
  if (library_ == nullptr) fail("search for products", "{}", description_);
  std::vector<cublasLtMatmulAlgo_t> seeds;
  for (const auto& [other, plan] : plans_) {
    ProductKey same = other.first;
    same.tokens = key.tokens;
    if (same == key && plan.library) seeds.push_back(plan.algorithm);
  }
  ProductChoice choice = search_product(context, *library_, key, seeds, options_);
  if (!options_.inexact) file(context).add(key, choice);
  return choice;
}

ProductChoice LibraryProducts::try_search(Context& context, const ProductKey& key) {
  try {
    return search(context, key);
  } catch (const Error& error) {
    log_warning("product {}: no search, the own kernel serves: {}", key.to_string(), error.what());
    return {};
  }
}

LibraryProducts::Plan LibraryProducts::make_plan(Context& context, const ProductKey& key,
                                                 const Product& product) {
  const bool biased = product.bias != nullptr;
  Plan plan;
  plan.call = std::make_unique<LibraryCall>(*library_, key.format, key.y_is_bf16, key.rows,
                                            key.depth, biased);
  const auto take = [&](const ProductChoice& choice) {
    plan.library = choice.library;
    std::memcpy(&plan.algorithm, choice.algorithm.data(), sizeof(plan.algorithm));
  };
  const auto holds = [&] { return is_in_class(context, *plan.call, plan.algorithm, product); };
  const ProductChoice* known = options_.inexact ? nullptr : file(context).find(key);
  if (known != nullptr) {
    take(*known);
    if (!plan.library || holds()) return plan;
  }
  if (known == nullptr || !biased) {
    if (known != nullptr) {
      log_warning("product {}: the choice on file gives other bytes here; searching anew",
                  key.to_string());
    }
    take(try_search(context, key));
  }
  if (biased && plan.library && !holds()) {
    log_info("product {}: the own kernel serves where there is a bias", key.to_string());
    plan.library = false;
  }
  return plan;
}

LibraryProducts::Plan* LibraryProducts::plan_for(Context& context, const Product& product) {
  if (!can_serve(product)) return nullptr;
  const ProductWeight& weight = product.weights[0];
  const ProductKey key{product.format, product.y_is_bf16, weight.rows, product.depth,
                       token_bucket(product.num_tokens)};
  const std::pair which(key, product.bias != nullptr);
  auto found = plans_.find(which);
  if (found == plans_.end()) {
    if (context.is_recording()) return nullptr;
    const int64_t step = product.format == ProductFormat::kBlocks ? kBlockTokens : 1;
    const Product whole = first_tokens(product, product.num_tokens / step * step);
    found = plans_.emplace(which, make_plan(context, key, whole)).first;
  }
  return found->second.library ? &found->second : nullptr;
}

void LibraryProducts::run_one(Context& context, const Product& product, Plan* plan) {
  if (plan == nullptr) return run_own_product(context, product);
  const int64_t rest =
      product.format == ProductFormat::kBlocks ? product.num_tokens % kBlockTokens : 0;
  const Product whole = first_tokens(product, product.num_tokens - rest);
  plan->call->set(whole, library_x_scales(context, whole));
  const cublasStatus_t status = plan->call->run(context, plan->algorithm);
  if (status != CUBLAS_STATUS_SUCCESS) {
    fail("linear", "cuBLASLt reports: {}", library_->status_string(status));
  }
  if (rest > 0) run_own_product(context, last_tokens(product, rest));
}

void LibraryProducts::run(Context& context, const Product& product) {
  if (product.num_weights == 1) return run_one(context, product, plan_for(context, product));
  // One launch of the own kernel, unless the library serves every part.
  Plan* plans[Product::kMaxWeights] = {};
  bool all = true;
  int64_t column = 0;
  for (int i = 0; i < product.num_weights && all; column += product.weights[i++].rows) {
    plans[i] = plan_for(context, single(product, i, column));
    all = plans[i] != nullptr;
  }
  if (!all) return run_own_product(context, product);
  column = 0;
  for (int i = 0; i < product.num_weights; column += product.weights[i++].rows) {
    run_one(context, single(product, i, column), plans[i]);
  }
}

void run_product(Context& context, const Product& product) {
  if (product.num_tokens == 0) return;
  if (product.segmented) return run_segmented_product(context, product);
  if (!run_shallow_product(context, product)) context.library().run(context, product);
}

}  // namespace octet::cuda

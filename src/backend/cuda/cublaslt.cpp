#include "backend/cuda/cublaslt.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstdlib>
#include <cstring>
#include <cublasLt.h>
#include <dlfcn.h>
#include <filesystem>
#include <vector>

#include <fmt/format.h>

#include "backend/cuda/checks.h"
#include "backend/cuda/compare.h"
#include "backend/cuda/status.h"
#include "backend/cuda/transpose.h"
#include "base/log.h"
#include "base/strings.h"

namespace octet::cuda {
namespace {

constexpr int64_t kWorkspaceBytes = int64_t{32} << 20;
constexpr int64_t kFewestTokens = 64;  // below, the own kernel has the memory's speed
constexpr int kCandidates = 8;
constexpr int kTimedRuns = 5;

// Where the library may be: the loader's own places, CUDA's, and PyTorch's wheels under every
// python3 of the PATH.
std::vector<std::string> places() {
  namespace fs = std::filesystem;
  std::error_code ignored;
  std::vector<std::string> found = {"libcublasLt.so.13", "/usr/local/cuda/lib64/libcublasLt.so.13"};
  const char* path = std::getenv("PATH");
  for (const std::string& folder : split(path == nullptr ? "" : path, ':')) {
    if (folder.empty() || !fs::exists(fs::path(folder) / "python3", ignored)) continue;
    const fs::path root = fs::path(folder).parent_path() / "lib";
    for (const auto& python : fs::directory_iterator(root, ignored)) {
      if (!python.path().filename().string().starts_with("python3")) continue;
      for (const char* packages : {"site-packages", "dist-packages"}) {
        const fs::path library = python.path() / packages / "nvidia/cu13/lib/libcublasLt.so.13";
        if (fs::exists(library, ignored)) found.push_back(library.string());
      }
    }
  }
  return found;
}

}  // namespace

struct LibraryProducts::Library {
  void* handle = nullptr;
  cublasLtHandle_t lt = nullptr;
  decltype(&cublasLtCreate) create;
  decltype(&cublasLtDestroy) destroy;
  decltype(&cublasLtGetVersion) version;
  decltype(&cublasLtMatmulDescCreate) desc_create;
  decltype(&cublasLtMatmulDescDestroy) desc_destroy;
  decltype(&cublasLtMatmulDescSetAttribute) desc_set;
  decltype(&cublasLtMatrixLayoutCreate) layout_create;
  decltype(&cublasLtMatrixLayoutDestroy) layout_destroy;
  decltype(&cublasLtMatmulPreferenceCreate) preference_create;
  decltype(&cublasLtMatmulPreferenceDestroy) preference_destroy;
  decltype(&cublasLtMatmulPreferenceSetAttribute) preference_set;
  decltype(&cublasLtMatmulAlgoGetHeuristic) heuristic;
  decltype(&cublasLtMatmul) matmul;

  // Stays loaded: it keeps state of its own until the process ends.
  ~Library() {
    if (lt != nullptr) destroy(lt);
  }

  // Empty where all is there; otherwise what is missing.
  std::string open() {
    for (const std::string& place : places()) {
      handle = dlopen(place.c_str(), RTLD_NOW | RTLD_LOCAL);
      if (handle != nullptr) break;
    }
    if (handle == nullptr) return "libcublasLt.so.13 was not found";
    std::string missing;
    const auto load = [&](auto& function, const char* name) {
      function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(handle, name));
      if (function == nullptr) missing = name;
    };
    load(create, "cublasLtCreate");
    load(destroy, "cublasLtDestroy");
    load(version, "cublasLtGetVersion");
    load(desc_create, "cublasLtMatmulDescCreate");
    load(desc_destroy, "cublasLtMatmulDescDestroy");
    load(desc_set, "cublasLtMatmulDescSetAttribute");
    load(layout_create, "cublasLtMatrixLayoutCreate");
    load(layout_destroy, "cublasLtMatrixLayoutDestroy");
    load(preference_create, "cublasLtMatmulPreferenceCreate");
    load(preference_destroy, "cublasLtMatmulPreferenceDestroy");
    load(preference_set, "cublasLtMatmulPreferenceSetAttribute");
    load(heuristic, "cublasLtMatmulAlgoGetHeuristic");
    load(matmul, "cublasLtMatmul");
    if (!missing.empty()) return fmt::format("libcublasLt has no {}", missing);
    if (create(&lt) != CUBLAS_STATUS_SUCCESS) return "cublasLtCreate failed";
    return "";
  }
};

struct LibraryProducts::Plan {
  bool use = false;
  bool final = true;  // the operands could tell the classes apart
  cublasLtMatmulAlgo_t algo{};
};

namespace {

// Descriptors of one product in the library's column-major terms: Yᵀ [N, T] = (Wᵀ)ᵀ Xᵀ.
template <class Library>
class Call {
 public:
  Call(const Library& library, const Product& p, const float* x_scales)
      : library_(library), p_(p), x_scales_(x_scales) {
    const ProductWeight& w = p.weights[0];
    const bool bf16 = p.format == ProductFormat::kBF16;
    const cudaDataType_t type = bf16 ? CUDA_R_16BF : CUDA_R_8F_E4M3;
    ok_ &= library.desc_create(&desc_, CUBLAS_COMPUTE_32F, CUDA_R_32F) == CUBLAS_STATUS_SUCCESS;
    if (!ok_) return;
    const cublasOperation_t transposed = CUBLAS_OP_T;
    set(CUBLASLT_MATMUL_DESC_TRANSA, transposed);
    if (!bf16) {
      const bool blocks = p.format == ProductFormat::kBlocks;
      const cublasLtMatmulMatrixScale_t w_mode = blocks
                                                     ? CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F
                                                     : CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F;
      const cublasLtMatmulMatrixScale_t x_mode = blocks
                                                     ? CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F
                                                     : CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F;
      set(CUBLASLT_MATMUL_DESC_A_SCALE_MODE, w_mode);
      set(CUBLASLT_MATMUL_DESC_B_SCALE_MODE, x_mode);
      set(CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, w.scales);
      set(CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, x_scales);
      const int8_t fast = 0;
      set(CUBLASLT_MATMUL_DESC_FAST_ACCUM, fast);
    }
    make(a_, type, p.depth, w.rows, w.stride);
    make(b_, type, p.depth, p.num_tokens, p.x_stride);
    make(d_, p.y_is_bf16 ? CUDA_R_16BF : CUDA_R_32F, w.rows, p.num_tokens, p.y_stride);
  }
  ~Call() {
    for (cublasLtMatrixLayout_t layout : {a_, b_, d_}) {
      if (layout != nullptr) library_.layout_destroy(layout);
    }
    if (desc_ != nullptr) library_.desc_destroy(desc_);
  }
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  bool ok() const { return ok_; }

  bool run(Context& context, const cublasLtMatmulAlgo_t& algo, void* y) const {
    const float one = 1, zero = 0;
    void* workspace = context.scratch(kScratchLibrary, kWorkspaceBytes);
    return library_.matmul(library_.lt, desc_, &one, p_.weights[0].data, a_, p_.x, b_, &zero, y, d_,
                           y, d_, &algo, workspace, kWorkspaceBytes,
                           context.stream()) == CUBLAS_STATUS_SUCCESS;
  }

  // Of this number of tokens and of others: what the heuristic offers for one works for all.
  std::vector<cublasLtMatmulAlgo_t> candidates() const {
    std::vector<cublasLtMatmulAlgo_t> found;
    cublasLtMatmulPreference_t preference = nullptr;
    if (library_.preference_create(&preference) != CUBLAS_STATUS_SUCCESS) return found;
    const size_t bytes = kWorkspaceBytes;
    library_.preference_set(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &bytes,
                            sizeof(bytes));
    // A chain over K that is split adds up in another order.
    const uint32_t unsplit = CUBLASLT_REDUCTION_SCHEME_NONE;
    library_.preference_set(preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &unsplit,
                            sizeof(unsplit));
    for (const int64_t tokens : {p_.num_tokens, int64_t{64}, int64_t{128}, int64_t{256},
                                 int64_t{512}, int64_t{1024}, int64_t{4096}, int64_t{16384}}) {
      Product other = p_;
      other.num_tokens = tokens;
      const Call call(library_, other, x_scales_);
      if (!call.ok()) continue;
      std::array<cublasLtMatmulHeuristicResult_t, kCandidates> results{};
      int count = 0;
      if (library_.heuristic(library_.lt, call.desc_, call.a_, call.b_, call.d_, call.d_,
                             preference, kCandidates, results.data(),
                             &count) != CUBLAS_STATUS_SUCCESS) {
        continue;
      }
      for (int i = 0; i < count; ++i) {
        const auto& result = results[static_cast<size_t>(i)];
        const bool known = std::ranges::any_of(found, [&](const cublasLtMatmulAlgo_t& algo) {
          return std::memcmp(&algo, &result.algo, sizeof(algo)) == 0;
        });
        if (result.state == CUBLAS_STATUS_SUCCESS && !known) found.push_back(result.algo);
      }
    }
    library_.preference_destroy(preference);
    return found;
  }

 private:
  template <class T>
  void set(cublasLtMatmulDescAttributes_t attribute, const T& value) {
    ok_ &= library_.desc_set(desc_, attribute, &value, sizeof(value)) == CUBLAS_STATUS_SUCCESS;
  }
  void make(cublasLtMatrixLayout_t& layout, cudaDataType_t type, int64_t rows, int64_t columns,
            int64_t stride) {
    ok_ &= library_.layout_create(&layout, type, static_cast<uint64_t>(rows),
                                  static_cast<uint64_t>(columns), stride) == CUBLAS_STATUS_SUCCESS;
  }

  const Library& library_;
  const Product& p_;
  const float* x_scales_;
  bool ok_ = true;
  cublasLtMatmulDesc_t desc_ = nullptr;
  cublasLtMatrixLayout_t a_ = nullptr, b_ = nullptr, d_ = nullptr;
};

// Events around a few runs, in milliseconds each.
template <class Body>
float time_of(Context& context, const Body& body) {
  cudaEvent_t begin = nullptr, end = nullptr;
  check(cudaEventCreate(&begin), "timing");
  check(cudaEventCreate(&end), "timing");
  body();
  check(cudaEventRecord(begin, context.stream()), "timing");
  for (int i = 0; i < kTimedRuns; ++i) body();
  check(cudaEventRecord(end, context.stream()), "timing");
  check(cudaEventSynchronize(end), "timing");
  float milliseconds = 0;
  check(cudaEventElapsedTime(&milliseconds, begin, end), "timing");
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
  return milliseconds / kTimedRuns;
}

}  // namespace

LibraryProducts::LibraryProducts(bool load) : library_(std::make_unique<Library>()) {
  const std::string missing = load ? library_->open() : "it was not asked for";
  if (!missing.empty()) {
    description_ = fmt::format("no cuBLASLt ({}): own kernels serve every product", missing);
    library_.reset();
    return;
  }
  const size_t version = library_->version();
  description_ =
      fmt::format("cuBLASLt {}.{}.{}", version / 10000, version / 100 % 100, version % 100);
}

LibraryProducts::~LibraryProducts() = default;

LibraryProducts::Plan LibraryProducts::search(Context& context, const Product& product,
                                              const float* x_scales) {
  Plan plan;
  const Call<Library> call(*library_, product, x_scales);
  if (!call.ok()) return plan;
  const int64_t bytes = product.num_tokens * product.y_stride * (product.y_is_bf16 ? 2 : 4);
  const int64_t row_bytes = product.weights[0].rows * (product.y_is_bf16 ? 2 : 4);
  const int64_t stride_bytes = product.y_stride * (product.y_is_bf16 ? 2 : 4);
  const tensor::Buffer other = context.allocator().allocate(bytes, "search for products");
  const float own = time_of(context, [&] { run_own_product(context, product); });
  float best = own;
  const std::vector<cublasLtMatmulAlgo_t> candidates = call.candidates();
  int in_class = 0;
  for (const cublasLtMatmulAlgo_t& algo : candidates) {
    if (!call.run(context, algo, other.data())) continue;
    const Verdict verdict =
        compare_rows(context, product.y, other.data(), product.num_tokens, row_bytes, stride_bytes);
    if (verdict == Verdict::kNothing) plan.final = false;
    if (verdict != Verdict::kEqual) continue;
    ++in_class;
    const float time = time_of(context, [&] { call.run(context, algo, other.data()); });
    if (time >= best) continue;
    best = time;
    plan.use = true;
    plan.algo = algo;
  }
  constexpr const char* kNames[] = {"bf16", "scaled", "blocks"};
  log_info("product {} {} x {}, {} tokens: own {:.1f} us, cuBLASLt {} ({} of {} in the class)",
           kNames[static_cast<int>(product.format)], product.weights[0].rows, product.depth,
           product.num_tokens, 1e3 * own,
           plan.use ? fmt::format("{:.1f} us", 1e3 * best) : "not faster", in_class,
           candidates.size());
  return plan;
}

bool LibraryProducts::run(Context& context, const Product& product) {
  const ProductWeight& weight = product.weights[0];
  const bool served =
      library_ != nullptr && product.num_weights == 1 && product.num_tokens >= kFewestTokens &&
      product.bias == nullptr && product.alpha == 1 && !product.accumulate && !product.x_is_e5m2 &&
      weight.rows % 16 == 0 && product.depth % 16 == 0 && product.y_stride % 8 == 0 &&
      (product.format == ProductFormat::kBF16 ||
       (product.format == ProductFormat::kScaled && weight.scale_stride == 1 &&
        product.x_scale_stride == 1) ||
       // The library reads rows of scales whose length is a multiple of four.
       (product.format == ProductFormat::kBlocks && product.depth % 512 == 0 &&
        product.num_tokens % 8 == 0 && weight.row_block == 128 && weight.chunk_stride == 1 &&
        weight.scale_stride == product.depth / 128));
  if (!served) return false;
  const auto bucket =
      static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(product.num_tokens)));
  const Key key{2 * static_cast<int>(product.format) + (product.y_is_bf16 ? 1 : 0), weight.rows,
                product.depth, bucket};
  auto found = plans_.find(key);
  if (found != plans_.end() && !found->second.use) return false;
  const float* x_scales = product.x_scales;
  if (product.format == ProductFormat::kBlocks) {
    auto* turned =
        context.scratch<float>(kScratchScales2, product.num_tokens * product.depth / 128);
    transpose_scales(context, product.x_scales, product.num_tokens, product.depth / 128, turned);
    x_scales = turned;
  }
  if (found == plans_.end()) {
    const Plan plan = search(context, product, x_scales);
    if (!plan.final) return false;
    found = plans_.emplace(key, plan).first;
  }
  if (!found->second.use) return false;
  const Call<Library> call(*library_, product, x_scales);
  return call.ok() && call.run(context, found->second.algo, product.y);
}

namespace {

// Every weight of a group by itself: by the library where it serves.
void run_singly(Context& context, const Product& product) {
  int64_t column = 0;
  for (int i = 0; i < product.num_weights; ++i) {
    Product single = product;
    single.weights[0] = product.weights[i];
    single.num_weights = 1;
    single.y = static_cast<char*>(product.y) + column * (product.y_is_bf16 ? 2 : 4);
    if (product.bias != nullptr) {
      single.bias =
          static_cast<const char*>(product.bias) + column * (product.bias_is_bf16 ? 2 : 4);
    }
    column += product.weights[i].rows;
    if (!context.library().run(context, single)) run_own_product(context, single);
  }
}

}  // namespace

bool LibraryProducts::prefers_singles(Context& context, const Product& product) {
  if (library_ == nullptr || product.num_tokens < kFewestTokens || product.accumulate) return false;
  int64_t rows = 0;
  for (int i = 0; i < product.num_weights; ++i) rows += product.weights[i].rows;
  const Key key{static_cast<int>(product.format), rows, product.depth,
                static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(product.num_tokens)))};
  const auto found = singles_.find(key);
  if (found != singles_.end()) return found->second;
  run_singly(context, product);  // searches
  const float singly = time_of(context, [&] { run_singly(context, product); });
  const float together = time_of(context, [&] { run_own_product(context, product); });
  return singles_[key] = singly < together;
}

void run_product(Context& context, const Product& product) {
  if (product.num_tokens == 0) return;
  if (product.num_weights > 1 && !context.library().prefers_singles(context, product)) {
    return run_own_product(context, product);
  }
  run_singly(context, product);
}

}  // namespace octet::cuda

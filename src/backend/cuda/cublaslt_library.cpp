#include "backend/cuda/cublaslt_library.h"

#include <cstdlib>
#include <dlfcn.h>
#include <filesystem>
#include <vector>

#include <fmt/format.h>

#include "base/error.h"
#include "base/strings.h"

namespace octet::cuda {
namespace {

// Where the library may be: the loader's own places, the toolkit that this was built with, CUDA's,
// and PyTorch's wheels under every python3 of the PATH.
std::vector<std::string> places() {
  namespace fs = std::filesystem;
  std::error_code ignored;
  std::vector<std::string> found = {"libcublasLt.so.13",
                                    OCTET_CUDA_TOOLKIT "/lib64/libcublasLt.so.13",
                                    "/usr/local/cuda/lib64/libcublasLt.so.13"};
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

CublasLt::CublasLt() {
  if (const std::string missing = open(); !missing.empty()) {
    handle_ = nullptr;
    version_ = missing;
    return;
  }
  const size_t version = get_version();
  version_ = fmt::format("{}.{}.{}", version / 10000, version / 100 % 100, version % 100);
}

// The shared library stays loaded: it keeps state of its own until the process ends.
CublasLt::~CublasLt() {
  if (loaded()) destroy(handle_);
}

std::string CublasLt::open() {
  void* library = nullptr;
  for (const std::string& place : places()) {
    library = dlopen(place.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (library != nullptr) break;
  }
  if (library == nullptr) return "libcublasLt.so.13 was not found";
  std::string missing;
  const auto load = [&](auto& function, const char* name) {
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(library, name));
    if (function == nullptr) missing = fmt::format("libcublasLt has no {}", name);
  };
  load(create, "cublasLtCreate");
  load(destroy, "cublasLtDestroy");
  load(get_version, "cublasLtGetVersion");
  load(status_string, "cublasLtGetStatusString");
  load(matmul, "cublasLtMatmul");
  load(desc_create, "cublasLtMatmulDescCreate");
  load(desc_destroy, "cublasLtMatmulDescDestroy");
  load(desc_set, "cublasLtMatmulDescSetAttribute");
  load(layout_create, "cublasLtMatrixLayoutCreate");
  load(layout_destroy, "cublasLtMatrixLayoutDestroy");
  load(layout_set, "cublasLtMatrixLayoutSetAttribute");
  load(preference_create, "cublasLtMatmulPreferenceCreate");
  load(preference_destroy, "cublasLtMatmulPreferenceDestroy");
  load(preference_set, "cublasLtMatmulPreferenceSetAttribute");
  load(heuristic, "cublasLtMatmulAlgoGetHeuristic");
  load(algo_init, "cublasLtMatmulAlgoInit");
  load(algo_check, "cublasLtMatmulAlgoCheck");
  load(algo_capability, "cublasLtMatmulAlgoCapGetAttribute");
  load(algo_set, "cublasLtMatmulAlgoConfigSetAttribute");
  load(algo_get, "cublasLtMatmulAlgoConfigGetAttribute");
  if (missing.empty() && create(&handle_) != CUBLAS_STATUS_SUCCESS) return "cublasLtCreate failed";
  return missing;
}

LibraryCall::LibraryCall(const CublasLt& library, ProductFormat format, bool y_is_bf16,
                         int64_t rows, int64_t depth, bool biased)
    : library_(library),
      x_type_(format == ProductFormat::kBF16 ? CUDA_R_16BF : CUDA_R_8F_E4M3),
      y_type_(y_is_bf16 ? CUDA_R_16BF : CUDA_R_32F),
      format_(format) {
  check(library.desc_create(&desc_, CUBLAS_COMPUTE_32F, CUDA_R_32F));
  set_desc(CUBLASLT_MATMUL_DESC_TRANSA, CUBLAS_OP_T);
  if (format != ProductFormat::kBF16) {
    const bool blocks = format == ProductFormat::kBlocks;
    set_desc(CUBLASLT_MATMUL_DESC_A_SCALE_MODE, blocks
                                                    ? CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F
                                                    : CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F);
    set_desc(CUBLASLT_MATMUL_DESC_B_SCALE_MODE, blocks
                                                    ? CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F
                                                    : CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F);
    set_desc(CUBLASLT_MATMUL_DESC_FAST_ACCUM, int8_t{0});
  }
  if (biased) {
    set_desc(CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_EPILOGUE_BIAS);
    set_desc(CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, y_type_);
  }
  // Numbers of tokens and strides are set before each use.
  const auto n = static_cast<uint64_t>(rows), k = static_cast<uint64_t>(depth);
  check(library.layout_create(&w_, x_type_, k, n, depth));
  check(library.layout_create(&x_, x_type_, k, 1, depth));
  check(library.layout_create(&y_, y_type_, n, 1, rows));
  product_.num_tokens = 1;
  product_.x_stride = product_.weights[0].stride = depth;
  product_.y_stride = rows;
}

LibraryCall::~LibraryCall() {
  for (cublasLtMatrixLayout_t layout : {w_, x_, y_}) {
    if (layout != nullptr) library_.layout_destroy(layout);
  }
  if (desc_ != nullptr) library_.desc_destroy(desc_);
}

void LibraryCall::check(cublasStatus_t status) const {
  if (status != CUBLAS_STATUS_SUCCESS) {
    fail("cuBLASLt", "a descriptor was refused: {}", library_.status_string(status));
  }
}

template <class T>
void LibraryCall::set_desc(cublasLtMatmulDescAttributes_t attribute, const T& value) {
  check(library_.desc_set(desc_, attribute, &value, sizeof(value)));
}

void LibraryCall::set_layout(cublasLtMatrixLayout_t layout, int64_t columns, int64_t stride) {
  check(library_.layout_set(layout, CUBLASLT_MATRIX_LAYOUT_COLS, &columns, sizeof(columns)));
  check(library_.layout_set(layout, CUBLASLT_MATRIX_LAYOUT_LD, &stride, sizeof(stride)));
}

void LibraryCall::set(const Product& product, const float* x_scales) {
  const ProductWeight& weight = product.weights[0];
  if (format_ != ProductFormat::kBF16) {
    set_desc(CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, weight.scales);
    set_desc(CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, x_scales);
  }
  if (product.bias != nullptr) set_desc(CUBLASLT_MATMUL_DESC_BIAS_POINTER, product.bias);
  if (weight.stride != product_.weights[0].stride) set_layout(w_, weight.rows, weight.stride);
  if (product.num_tokens != product_.num_tokens || product.x_stride != product_.x_stride) {
    set_layout(x_, product.num_tokens, product.x_stride);
  }
  if (product.num_tokens != product_.num_tokens || product.y_stride != product_.y_stride) {
    set_layout(y_, product.num_tokens, product.y_stride);
  }
  product_ = product;
}

cublasStatus_t LibraryCall::run(Context& context, const cublasLtMatmulAlgo_t& algo) {
  const float one = 1, zero = 0;
  void* workspace = context.scratch(kScratchLibrary, kWorkspaceBytes);
  return library_.matmul(library_.handle(), desc_, &one, product_.weights[0].data, w_, product_.x,
                         x_, &zero, product_.y, y_, product_.y, y_, &algo, workspace,
                         kWorkspaceBytes, context.stream());
}

bool LibraryCall::accepts(const cublasLtMatmulAlgo_t& algo) const {
  cublasLtMatmulHeuristicResult_t result{};
  return library_.algo_check(library_.handle(), desc_, w_, x_, y_, y_, &algo, &result) ==
             CUBLAS_STATUS_SUCCESS &&
         result.workspaceSize <= static_cast<size_t>(kWorkspaceBytes);
}

bool LibraryCall::init(int id, cublasLtMatmulAlgo_t& algo) const {
  return library_.algo_init(library_.handle(), CUBLAS_COMPUTE_32F, CUDA_R_32F, x_type_, x_type_,
                            y_type_, y_type_, id, &algo) == CUBLAS_STATUS_SUCCESS;
}

int LibraryCall::offers(bool split, int count, cublasLtMatmulHeuristicResult_t* results) const {
  cublasLtMatmulPreference_t preference = nullptr;
  check(library_.preference_create(&preference));
  const size_t bytes = kWorkspaceBytes;
  const uint32_t schemes = split ? CUBLASLT_REDUCTION_SCHEME_MASK : CUBLASLT_REDUCTION_SCHEME_NONE;
  int found = 0;
  const bool done = library_.preference_set(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                                            &bytes, sizeof(bytes)) == CUBLAS_STATUS_SUCCESS &&
                    library_.preference_set(preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
                                            &schemes, sizeof(schemes)) == CUBLAS_STATUS_SUCCESS &&
                    library_.heuristic(library_.handle(), desc_, w_, x_, y_, y_, preference, count,
                                       results, &found) == CUBLAS_STATUS_SUCCESS;
  library_.preference_destroy(preference);
  return done ? found : 0;
}

}  // namespace octet::cuda

// cuBLASLt's functions, loaded at run time where the library is there.
#pragma once

#include <cublasLt.h>
#include <string>

#include "backend/cuda/product.h"

namespace octet::cuda {

class CublasLt {
 public:
  CublasLt();  // never fails: loaded() says whether the rest may be used
  ~CublasLt();
  CublasLt(const CublasLt&) = delete;
  CublasLt& operator=(const CublasLt&) = delete;

  bool loaded() const { return handle_ != nullptr; }
  cublasLtHandle_t handle() const { return handle_; }
  // "13.1.0", or why there is none.
  const std::string& version() const { return version_; }

  decltype(&cublasLtCreate) create;
  decltype(&cublasLtDestroy) destroy;
  decltype(&cublasLtGetVersion) get_version;
  decltype(&cublasLtGetStatusString) status_string;
  decltype(&cublasLtMatmul) matmul;
  decltype(&cublasLtMatmulDescCreate) desc_create;
  decltype(&cublasLtMatmulDescDestroy) desc_destroy;
  decltype(&cublasLtMatmulDescSetAttribute) desc_set;
  decltype(&cublasLtMatrixLayoutCreate) layout_create;
  decltype(&cublasLtMatrixLayoutDestroy) layout_destroy;
  decltype(&cublasLtMatrixLayoutSetAttribute) layout_set;
  decltype(&cublasLtMatmulPreferenceCreate) preference_create;
  decltype(&cublasLtMatmulPreferenceDestroy) preference_destroy;
  decltype(&cublasLtMatmulPreferenceSetAttribute) preference_set;
  decltype(&cublasLtMatmulAlgoGetHeuristic) heuristic;
  decltype(&cublasLtMatmulAlgoInit) algo_init;
  decltype(&cublasLtMatmulAlgoCheck) algo_check;
  decltype(&cublasLtMatmulAlgoCapGetAttribute) algo_capability;
  decltype(&cublasLtMatmulAlgoConfigSetAttribute) algo_set;
  decltype(&cublasLtMatmulAlgoConfigGetAttribute) algo_get;

 private:
  std::string open();  // empty, or what is missing

  cublasLtHandle_t handle_ = nullptr;
  std::string version_;
};

// One product of a format and a shape in the library's column-major terms: Yᵀ [N, T] = (Wᵀ)ᵀ Xᵀ,
// with `biased` plus a bias of Y's dtype.
// The descriptors are made once; pointers, strides and the number of tokens may change between
// runs.
class LibraryCall {
 public:
  static constexpr int64_t kWorkspaceBytes = int64_t{32} << 20;

  LibraryCall(const CublasLt& library, ProductFormat format, bool y_is_bf16, int64_t rows,
              int64_t depth, bool biased = false);
  ~LibraryCall();
  LibraryCall(const LibraryCall&) = delete;
  LibraryCall& operator=(const LibraryCall&) = delete;

  // Turns the call to this product of one weight. x_scales: as the library wants them, per token,
  // or [K / 128, T].
  void set(const Product& product, const float* x_scales);

  // Of what `set` said.
  cublasStatus_t run(Context& context, const cublasLtMatmulAlgo_t& algo);
  // Whether it says that it can, within the workspace.
  bool accepts(const cublasLtMatmulAlgo_t& algo) const;
  // An algorithm of this id, for this product's types; false where there is none.
  bool init(int id, cublasLtMatmulAlgo_t& algo) const;
  // At most `count` offers, best first; those that split K only with `split`.
  int offers(bool split, int count, cublasLtMatmulHeuristicResult_t* results) const;

 private:
  void check(cublasStatus_t status) const;
  template <class T>
  void set_desc(cublasLtMatmulDescAttributes_t attribute, const T& value);
  void set_layout(cublasLtMatrixLayout_t layout, int64_t columns, int64_t stride);

  const CublasLt& library_;
  cudaDataType_t x_type_, y_type_;
  ProductFormat format_;
  cublasLtMatmulDesc_t desc_ = nullptr;
  cublasLtMatrixLayout_t w_ = nullptr, x_ = nullptr, y_ = nullptr;
  Product product_;
};

}  // namespace octet::cuda

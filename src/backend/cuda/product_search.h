// Finding the fastest algorithm of cuBLASLt for a product: what its heuristic offers for this and
// for other numbers of tokens, and configurations that only a search finds. A candidate must give,
// byte for byte, the rows of run_own_product, which define the numeric class; time decides among
// those that do, and the own kernel.
#pragma once

#include <span>

#include "backend/cuda/cublaslt_library.h"
#include "backend/cuda/product_choices.h"

namespace octet::cuda {

struct SearchOptions {
  double seconds = 0.1;  // of looking at configurations, beside the heuristic's offers
  // Takes any algorithm, chains that are split over K included, and looks at no bytes.
  bool inexact = false;
};

// Takes trial_bytes for its time; Error where there is no memory for them. The weights that a run
// reads are never in the cache, as a layer's are not. One line is logged. Waits; must not run while
// the stream is captured. `seeds`: what served other numbers of tokens.
ProductChoice search_product(Context& context, const CublasLt& library, const ProductKey& key,
                             std::span<const cublasLtMatmulAlgo_t> seeds,
                             const SearchOptions& options);

// Whether the library's rows of this product are the own kernel's. Writes product.y. A product
// whose rows are all zeros proves nothing and passes. Waits.
bool is_in_class(Context& context, LibraryCall& call, const cublasLtMatmulAlgo_t& algo,
                 const Product& product);

// x's scales as the library reads them: those of blocks are turned to [K / 128, T].
const float* library_x_scales(Context& context, const Product& product);

}  // namespace octet::cuda

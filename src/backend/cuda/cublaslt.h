// cuBLASLt, loaded at run time where it is there: products whose rows are, byte for byte, those of
// run_product. A candidate must prove that on the first operands of a shape; of those that do, and
// the own kernel, the fastest serves from then on.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <tuple>

#include "backend/cuda/product.h"

namespace octet::cuda {

class LibraryProducts {
 public:
  explicit LibraryProducts(bool load = true);  // false: it serves nothing
  ~LibraryProducts();
  LibraryProducts(const LibraryProducts&) = delete;
  LibraryProducts& operator=(const LibraryProducts&) = delete;

  // "cuBLASLt 13.1.0 from …", or why there is none.
  const std::string& description() const { return description_; }

  // y of one weight; false where the library does not serve this product (nothing is queued then).
  bool run(Context& context, const Product& product);
  // Whether the weights of a group are faster one by one than in one launch of the own kernel.
  bool prefers_singles(Context& context, const Product& product);

 private:
  struct Library;
  struct Plan;
  // Format, rows, depth, and the bucket of tokens: the power of two at or above.
  using Key = std::tuple<int, int64_t, int64_t, int64_t>;

  Plan search(Context& context, const Product& product, const float* x_scales);

  std::unique_ptr<Library> library_;
  std::string description_;
  std::map<Key, Plan> plans_;
  std::map<Key, bool> singles_;
};

}  // namespace octet::cuda

// Who serves a product: the own kernel, or cuBLASLt with an algorithm whose rows are the own
// kernel's, byte for byte. The choice is made once for each shape, format and bucket of tokens:
// from the file of choices, tested on the first operands, or by a search.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "backend/cuda/product_search.h"
#include "ops/workspace.h"

namespace octet::cuda {

class LibraryProducts {
 public:
  explicit LibraryProducts(bool load = true);  // false: own kernels serve everything
  ~LibraryProducts();
  LibraryProducts(const LibraryProducts&) = delete;
  LibraryProducts& operator=(const LibraryProducts&) = delete;

  // "cuBLASLt 13.1.0", or why there is none.
  const std::string& description() const { return description_; }

  // Of kScratchLibrary; 0 where no product of this shape is large enough for the library.
  int64_t workspace_bytes(const ops::WorkspaceShape& shape) const;
  // Searches for what products of this shape need and no file knows, taking `search_bytes` at most.
  int64_t search_bytes(Context& context, const ops::WorkspaceShape& shape);
  void prepare(Context& context, const ops::WorkspaceShape& shape);

  // From now on any algorithm is taken, whatever its rows: to measure what exactness costs. Such
  // choices are not kept.
  void set_inexact() { options_.inexact = true; }
  void set_search_seconds(double seconds) { options_.seconds = seconds; }

  // y of a group of weights. Searches where nothing was prepared, but never while the stream is
  // captured: the own kernel serves then what is not known.
  void run(Context& context, const Product& product);

  // Searches for a product of one weight now, whatever is known; for measuring.
  ProductChoice search(Context& context, const ProductKey& key);

  // All choices known, as JSON; empty before the first product.
  std::string choices() const;

 private:
  struct Plan;

  // The plan for a product of one weight, or null where the own kernel serves. One with a bias has
  // the algorithm of that without, where it adds the bias as the own kernel does.
  Plan* plan_for(Context& context, const Product& product);
  std::vector<ProductKey> unknown(Context& context, const ops::WorkspaceShape& shape);
  // Without memory for a search the own kernel serves.
  ProductChoice try_search(Context& context, const ProductKey& key);
  Plan make_plan(Context& context, const ProductKey& key, const Product& product);
  void run_one(Context& context, const Product& product, Plan* plan);
  bool can_serve(const Product& product) const;
  ProductChoices& file(Context& context);

  std::unique_ptr<CublasLt> library_;
  std::string description_;
  SearchOptions options_;
  std::unique_ptr<ProductChoices> file_;
  std::map<std::pair<ProductKey, bool>, Plan> plans_;  // with a bias or without
};

}  // namespace octet::cuda

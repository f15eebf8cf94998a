// Which algorithm serves which product, as searches found it, in a file for each device and library
// version: products-NAME-VERSION.json in $OCTET_CACHE, else $XDG_CACHE_HOME/octet, else
// ~/.cache/octet. Where that file knows nothing, one of the same name that comes with the program
// is asked (share/products beside the program, or in the source tree). Choices differ in time
// alone: every one gives the same bytes.
#pragma once

#include <array>
#include <compare>
#include <map>
#include <string>
#include <vector>

#include "backend/cuda/product.h"

namespace octet::cuda {

// A shape in a format, and the bucket of tokens: that many and fewer, down to the bucket below.
struct ProductKey {
  ProductFormat format = ProductFormat::kBF16;
  bool y_is_bf16 = true;
  int64_t rows = 0, depth = 0, tokens = 0;
  auto operator<=>(const ProductKey&) const = default;
  std::string to_string() const;  // "scaled 6144 x 4096, 33-64 tokens"
};

// 1, 8, 16, 32, 64 …: the smallest bucket that holds `num_tokens`, and the fewest it holds.
int64_t token_bucket(int64_t num_tokens);
int64_t bucket_begin(int64_t bucket);

struct ProductChoice {
  bool library = false;                 // or the own kernel
  std::array<uint64_t, 8> algorithm{};  // cublasLtMatmulAlgo_t; valid for one library version
  std::string description;              // of the algorithm, for people
  // As the search timed them, weights coming from memory; 0: not offered.
  double microseconds = 0, own_microseconds = 0, heuristic_microseconds = 0;
};

class ProductChoices {
 public:
  // Reads both files. What cannot be read or is another's is passed over with a warning.
  ProductChoices(std::string device, std::string library_version);

  const ProductChoice* find(const ProductKey& key) const;  // null: not known
  // Remembers, and writes the file; where that fails, warns once.
  void add(const ProductKey& key, const ProductChoice& choice);
  void forget(const ProductKey& key) { found_.erase(key); }

  std::string to_text() const;  // all that is known, as JSON
  const std::string& path() const { return path_; }

 private:
  using Map = std::map<ProductKey, ProductChoice>;
  std::string to_text(const Map& choices) const;
  Map read(const std::string& path) const;

  std::string device_, library_version_, path_;
  Map found_, shipped_;
  bool warned_ = false;
};

// Lines on the files in the cache's folder, one for each file and one for each choice in it; and a
// line for each file that comes with the program.
std::string describe_product_choices();

}  // namespace octet::cuda

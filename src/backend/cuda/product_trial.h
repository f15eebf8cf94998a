// What a search for a product tries its candidates on.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "backend/cuda/context.h"
#include "backend/cuda/product_choices.h"

namespace octet::cuda {

// The operands of a search for a product, the own kernel's digests, and a stopwatch. Operands are
// made for the purpose and freed again; Error where there is no memory for them.
class ProductTrial {
 public:
  ProductTrial(Context& context, const ProductKey& key);

  // Of so many tokens, with the next copy of the weight.
  Product product(int64_t num_tokens);
  // What one run of `body`, a product, adds to a chain in which small kernels stand before each,
  // as in a layer; of `runs`. `recorded`: the chain is a graph, in which the library's own small
  // steps take longer.
  double microseconds(int runs, bool recorded, const std::function<void()>& body);
  // Tokens that its operands hold: the key's, and so many that a rare difference shows.
  int64_t num_tokens() const { return num_tokens_; }
  // What the own kernel's rows come to.
  const std::vector<uint64_t>& expected(int64_t num_tokens);
  std::vector<uint64_t> digests(int64_t num_tokens);
  // Zeros in y, since an old row is no answer; `product` gives the weight that `expected` takes.
  void prepare_test(int64_t num_tokens);

 private:
  tensor::Buffer allocate(int64_t num_bytes) {
    return context_.allocator().allocate(num_bytes, "search for products");
  }

  Context& context_;
  ProductKey key_;
  int64_t copies_ = 1, next_copy_ = 0, weight_bytes_ = 0, num_tokens_ = 0;
  tensor::Buffer weights_, x_, y_, w_scales_, x_scales_;
  struct DestroyEvent {
    void operator()(cudaEvent_t event) const { cudaEventDestroy(event); }
  };
  using Event = std::unique_ptr<CUevent_st, DestroyEvent>;
  static Event make_event();
  Event begin_ = make_event(), end_ = make_event();
  std::map<std::pair<int, bool>, double> small_kernel_microseconds_;  // by runs and `recorded`
  std::map<int64_t, std::vector<uint64_t>> expected_;
};

// Device memory that a search takes for its time.
int64_t trial_bytes(const Context& context, const ProductKey& key);

}  // namespace octet::cuda

#include "backend/cuda/product_search.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>

#include <fmt/format.h>

#include "backend/cuda/checks.h"
#include "backend/cuda/product_trial.h"
#include "backend/cuda/product_trial_kernels.h"
#include "backend/cuda/status.h"
#include "backend/cuda/transpose.h"
#include "base/log.h"

namespace octet::cuda {
namespace {

using Algorithm = cublasLtMatmulAlgo_t;

constexpr int kSearchedId = 66;              // the id whose configurations are fastest on Hopper
constexpr int kOffers = 8;                   // what the heuristic returns at most
constexpr size_t kFinalists = 16;            // timed again and then tested
constexpr double kFinalMicroseconds = 1500;  // of timing one of them
constexpr int kScreeningRuns = 2, kFinalRuns = 8, kTurns = 3;
// Near ties of few tokens are the own kernel's: what follows it comes early.
constexpr double kNearTie = 0.98;
constexpr int64_t kFewTokens = 64;
constexpr int64_t kRecordedTokens = 1024;  // a step of decoding seldom has more

double now_seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

template <class T>
T config_of(const CublasLt& library, const Algorithm& algorithm,
            cublasLtMatmulAlgoConfigAttributes_t attribute) {
  T value = 0;
  size_t written = 0;
  library.algo_get(&algorithm, attribute, &value, sizeof(value), &written);
  return value;
}

std::string describe(const CublasLt& library, const Algorithm& a) {
  const auto splits = config_of<int32_t>(library, a, CUBLASLT_ALGO_CONFIG_SPLITK_NUM);
  return fmt::format("cuBLASLt {} tile {} stages {} cluster {} option {} swizzle {}{}",
                     config_of<int32_t>(library, a, CUBLASLT_ALGO_CONFIG_ID),
                     config_of<uint32_t>(library, a, CUBLASLT_ALGO_CONFIG_TILE_ID),
                     config_of<uint32_t>(library, a, CUBLASLT_ALGO_CONFIG_STAGES_ID),
                     config_of<uint16_t>(library, a, CUBLASLT_ALGO_CONFIG_CLUSTER_SHAPE_ID),
                     config_of<uint32_t>(library, a, CUBLASLT_ALGO_CONFIG_CUSTOM_OPTION),
                     config_of<uint32_t>(library, a, CUBLASLT_ALGO_CONFIG_CTA_SWIZZLING),
                     splits > 1 ? fmt::format(" split {}", splits) : "");
}

struct Tile {
  cublasLtMatmulTile_t id;
  int rows, tokens;
};

// The tiles among which Hopper's fastest were seen.
#define T(rows, tokens) \
  { CUBLASLT_MATMUL_TILE_##rows##x##tokens, rows, tokens }
#define FEW(rows)                                                                           \
  T(rows, 8), T(rows, 16), T(rows, 24), T(rows, 32), T(rows, 40), T(rows, 48), T(rows, 56), \
      T(rows, 64)
#define MANY(rows) T(rows, 64), T(rows, 128)
// clang-format off
constexpr Tile kTiles[] = {
    FEW(64), FEW(128), FEW(192), FEW(256),
    T(320, 8), T(320, 16), T(384, 8), T(384, 16), T(384, 24), T(384, 32),
    T(64, 72), T(64, 80), T(64, 96), T(64, 112), T(64, 128), T(64, 136), T(64, 192), T(64, 256),
    T(128, 72), T(128, 80), T(128, 96), T(128, 112), T(128, 128), T(128, 136), T(128, 160),
    T(128, 176), T(128, 192), T(128, 208), T(128, 224), T(128, 256),
    T(192, 96), T(192, 128), T(256, 96), T(256, 128),
    MANY(8), MANY(16), MANY(32), MANY(40), MANY(48), MANY(56), MANY(72), MANY(80), MANY(88),
    MANY(96), MANY(112), MANY(120), MANY(136), MANY(144), MANY(160), MANY(176), MANY(184),
    MANY(208), MANY(224)};
// clang-format on
#undef MANY
#undef FEW
#undef T

// Roughly how long a product takes in such tiles, in no unit: whole waves over the multiprocessors,
// each of a load or a multiplication, whichever is longer.
double expected_time(const Tile& tile, const ProductKey& key, int num_multiprocessors) {
  constexpr double kMultiplyOverLoad = 1.0 / 110;  // of one element
  const auto tiles =
      static_cast<double>(divide_up(key.rows, tile.rows) * divide_up(key.tokens, tile.tokens));
  const double share = tiles / num_multiprocessors;
  const double waves = share < 3 ? std::ceil(share) : share + 0.5;
  return waves *
         std::max<double>(tile.rows + tile.tokens, kMultiplyOverLoad * tile.rows * tile.tokens);
}

// Configurations of the searched algorithm in the order of what their tiles should take; whether
// the library accepts them is another question.
std::vector<Algorithm> configurations(const CublasLt& library, const LibraryCall& call,
                                      const ProductKey& key, int num_multiprocessors) {
  std::vector<Algorithm> found;
  Algorithm plain{};
  if (!call.init(kSearchedId, plain)) return found;
  const auto stages = key.format == ProductFormat::kBF16 ? CUBLASLT_MATMUL_STAGES_64xAUTO
                                                         : CUBLASLT_MATMUL_STAGES_128xAUTO;
  std::vector<Tile> tiles(std::begin(kTiles), std::end(kTiles));
  std::ranges::stable_sort(
      tiles, {}, [&](const Tile& tile) { return expected_time(tile, key, num_multiprocessors); });
  // With block scales options below 4 are accepted, but their rows are wrong, some by chance only.
  const int32_t first_option = key.format == ProductFormat::kBlocks ? 4 : 0;
  for (const Tile& tile : tiles) {
    for (int32_t option = first_option; option < 8; ++option) {
      for (const auto cluster : {CUBLASLT_CLUSTER_SHAPE_1x1x1, CUBLASLT_CLUSTER_SHAPE_2x1x1,
                                 CUBLASLT_CLUSTER_SHAPE_1x2x1, CUBLASLT_CLUSTER_SHAPE_4x1x1,
                                 CUBLASLT_CLUSTER_SHAPE_2x2x1, CUBLASLT_CLUSTER_SHAPE_4x2x1}) {
        Algorithm algorithm = plain;
        const auto set = [&](cublasLtMatmulAlgoConfigAttributes_t attribute, const auto& value) {
          return library.algo_set(&algorithm, attribute, &value, sizeof(value)) ==
                 CUBLAS_STATUS_SUCCESS;
        };
        if (set(CUBLASLT_ALGO_CONFIG_TILE_ID, static_cast<uint32_t>(tile.id)) &&
            set(CUBLASLT_ALGO_CONFIG_STAGES_ID, static_cast<uint32_t>(stages)) &&
            set(CUBLASLT_ALGO_CONFIG_CUSTOM_OPTION, static_cast<uint32_t>(option)) &&
            set(CUBLASLT_ALGO_CONFIG_CLUSTER_SHAPE_ID, static_cast<uint16_t>(cluster))) {
          found.push_back(algorithm);
        }
      }
    }
  }
  return found;
}

struct Timed {
  Algorithm algorithm;
  double microseconds;
};

// A search's state: candidates come one by one, the fastest are kept.
class Search {
 public:
  Search(Context& context, const CublasLt& library, const ProductKey& key,
         const SearchOptions& options)
      : context_(context),
        library_(library),
        key_(key),
        options_(options),
        trial_(context, key),
        call_(library, key.format, key.y_is_bf16, key.rows, key.depth) {}

  ProductChoice run(std::span<const Algorithm> seeds);

 private:
  bool run_once(const Algorithm& algorithm, int64_t num_tokens) {
    const Product product = trial_.product(num_tokens);
    call_.set(product, library_x_scales(context_, product));
    if (call_.run(context_, algorithm) == CUBLAS_STATUS_SUCCESS) return true;
    cudaGetLastError();  // a refused launch is no error of ours
    return false;
  }
  double time(const Algorithm& algorithm, int runs, bool recorded = false) {
    return trial_.microseconds(runs, recorded, [&] { run_once(algorithm, key_.tokens); });
  }
  bool is_recorded() const { return key_.tokens <= kRecordedTokens; }
  static int final_runs(double microseconds) {
    return std::clamp(static_cast<int>(kFinalMicroseconds / microseconds), 2, kFinalRuns);
  }
  bool screen(const Algorithm& algorithm);  // false where it does not run
  bool in_class(const Algorithm& algorithm);
  void time_in_turns(std::vector<Timed>& finalists, std::vector<Timed>& offered);
  std::vector<Algorithm> offers(int64_t num_tokens);

  Context& context_;
  const CublasLt& library_;
  ProductKey key_;
  SearchOptions options_;
  ProductTrial trial_;
  LibraryCall call_;
  std::vector<Timed> timed_;
  int tried_ = 0;
};

std::vector<Algorithm> Search::offers(int64_t num_tokens) {
  std::array<cublasLtMatmulHeuristicResult_t, kOffers> results{};
  Product product = trial_.product(key_.tokens);
  product.num_tokens = num_tokens;
  call_.set(product, product.x_scales);
  const int count = call_.offers(options_.inexact, kOffers, results.data());
  std::vector<Algorithm> found;
  for (int i = 0; i < count; ++i) {
    if (results[static_cast<size_t>(i)].state == CUBLAS_STATUS_SUCCESS) {
      found.push_back(results[static_cast<size_t>(i)].algo);
    }
  }
  return found;
}

bool Search::screen(const Algorithm& algorithm) {
  // The first run loads the kernel.
  if (!run_once(algorithm, key_.tokens)) return false;
  ++tried_;
  timed_.push_back({algorithm, time(algorithm, kScreeningRuns)});
  return true;
}

bool Search::in_class(const Algorithm& algorithm) {
  if (options_.inexact) return true;
  const int64_t step = key_.format == ProductFormat::kBlocks ? 8 : 1;
  for (const int64_t tokens :
       {round_up(bucket_begin(key_.tokens), step), key_.tokens, trial_.num_tokens(), key_.tokens}) {
    const std::vector<uint64_t>& expected = trial_.expected(tokens);
    trial_.prepare_test(tokens);
    if (!run_once(algorithm, tokens) || trial_.digests(tokens) != expected) return false;
  }
  return true;
}

// In turns, since the device's clock moves.
void Search::time_in_turns(std::vector<Timed>& finalists, std::vector<Timed>& offered) {
  std::vector<Timed*> all;
  for (std::vector<Timed>* list : {&finalists, &offered}) {
    for (Timed& one : *list) all.push_back(&one);
  }
  std::vector<double> best(all.size(), 1e9);
  for (int turn = 0; turn < kTurns; ++turn) {
    for (size_t i = 0; i < all.size(); ++i) {
      const int runs = final_runs(kTurns * all[i]->microseconds);
      best[i] = std::min(best[i], time(all[i]->algorithm, runs, is_recorded()));
    }
  }
  for (size_t i = 0; i < all.size(); ++i) all[i]->microseconds = best[i];
}

ProductChoice Search::run(std::span<const Algorithm> seeds) {
  const double begin = now_seconds();
  ProductChoice choice;
  choice.description = "own kernel";
  const auto run_own = [&] { run_own_product(context_, trial_.product(key_.tokens)); };
  run_own();
  const int own_runs = final_runs(trial_.microseconds(kScreeningRuns, false, run_own));
  choice.own_microseconds = 1e9;
  for (int turn = 0; turn < kTurns; ++turn) {
    choice.own_microseconds =
        std::min(choice.own_microseconds, trial_.microseconds(own_runs, is_recorded(), run_own));
  }
  choice.microseconds = choice.own_microseconds;

  for (const Algorithm& algorithm : seeds) screen(algorithm);
  std::vector<Timed> offered;  // by the heuristic for this number of tokens
  for (const int64_t tokens :
       {key_.tokens, int64_t{64}, int64_t{256}, int64_t{1024}, int64_t{16384}}) {
    for (const Algorithm& algorithm : offers(tokens)) {
      if (screen(algorithm) && tokens == key_.tokens && in_class(algorithm)) {
        offered.push_back(timed_.back());
      }
    }
  }
  const Product product = trial_.product(key_.tokens);
  call_.set(product, product.x_scales);
  const double search_begin = now_seconds();
  for (const Algorithm& algorithm :
       configurations(library_, call_, key_, context_.num_multiprocessors())) {
    if (now_seconds() - search_begin > options_.seconds) break;
    if (call_.accepts(algorithm)) screen(algorithm);
  }

  // The first few are timed better before their bytes are looked at.
  const auto by_time = [](const Timed& a, const Timed& b) {
    return a.microseconds < b.microseconds;
  };
  std::ranges::sort(timed_, by_time);
  timed_.resize(std::min(timed_.size(), kFinalists));
  time_in_turns(timed_, offered);
  for (const Timed& one : offered) {
    if (choice.heuristic_microseconds == 0 || one.microseconds < choice.heuristic_microseconds) {
      choice.heuristic_microseconds = one.microseconds;
    }
  }
  std::ranges::sort(timed_, by_time);
  const double least = (key_.tokens <= kFewTokens ? kNearTie : 1) * choice.own_microseconds;
  for (const Timed& candidate : timed_) {
    if (candidate.microseconds >= least) break;
    if (!in_class(candidate.algorithm)) continue;
    choice.library = true;
    std::memcpy(choice.algorithm.data(), &candidate.algorithm, sizeof(Algorithm));
    choice.microseconds = candidate.microseconds;
    choice.description = describe(library_, candidate.algorithm);
    break;
  }
  log_info("product {}: {:.1f} us by {}; own kernel {:.1f}, heuristic {:.1f}; {} tried in {:.2f} s",
           key_.to_string(), choice.microseconds, choice.description, choice.own_microseconds,
           choice.heuristic_microseconds, tried_, now_seconds() - begin);
  return choice;
}

}  // namespace

const float* library_x_scales(Context& context, const Product& product) {
  if (product.format != ProductFormat::kBlocks) return product.x_scales;
  const int64_t chunks = product.depth / 128;
  auto* turned = context.scratch<float>(kScratchScales2, product.num_tokens * chunks);
  transpose_scales(context, product.x_scales, product.num_tokens, chunks, turned);
  return turned;
}

bool is_in_class(Context& context, LibraryCall& call, const Algorithm& algorithm,
                 const Product& product) {
  const int64_t each = product.y_is_bf16 ? 2 : 4;
  const auto digests = [&] {
    return digest_rows(context, product.y, product.num_tokens, product.weights[0].rows * each,
                       product.y_stride * each);
  };
  run_own_product(context, product);
  const std::vector<uint64_t> expected = digests();
  call.set(product, library_x_scales(context, product));
  return call.run(context, algorithm) == CUBLAS_STATUS_SUCCESS && digests() == expected;
}

ProductChoice search_product(Context& context, const CublasLt& library, const ProductKey& key,
                             std::span<const cublasLtMatmulAlgo_t> seeds,
                             const SearchOptions& options) {
  return Search(context, library, key, options).run(seeds);
}

}  // namespace octet::cuda
